// Heads of a step's rows in registers: bias, RMS norm and RoPE, in f32, before they are stored.
#pragma once

// How H::kLanes lanes share a head. H, spelled out in the kernel, has kDim, kWidth, kLanes, kRotaryBegin, kRotaryDim and kNeox:
// of kDim elements, RoPE rotates kRotaryDim from kRotaryBegin on. A lane has pairs of vectors of kWidth elements, half of
// kRotaryDim apart, so that neighbouring lanes have neighbouring vectors: neox rotates the two of a pair against each other,
// interleaved neighbours in a vector. The dims that stay follow in the same way. So no lane asks another one for an element.
//
// Where H has kBits, sizes are powers of two, and the dims that stay follow in runs of kRotaryDim that lie as the rotated one
// does:
// every bit of a lane's number, or of an element's in its vector, is then a bit of the dim.
template <typename H, typename = void>
constexpr bool kByBits = false;
template <typename H>
constexpr bool kByBits<H, decltype((void)H::kBits)> = true;

template <typename H>
struct HeadLayout {
  static constexpr uint32_t kDim = H::kDim, kWidth = H::kWidth, kLanes = H::kLanes, kRotaryBegin = H::kRotaryBegin, kRotaryDim = H::kRotaryDim;
  static constexpr bool kNeox = H::kNeox;
  static constexpr uint32_t kPairs = (kDim + 2 * kWidth - 1) / (2 * kWidth);
  static constexpr uint32_t kChunks = (kPairs + kLanes - 1) / kLanes;
  static constexpr uint32_t kRotaryPairs = kRotaryDim / (2 * kWidth);  // pairs of vectors that are rotated
  // RoPE pairs whose elements both lie in one vector, or, neox, in one pair of them.
  static constexpr bool kAcross = kNeox || kWidth == 1;
  static constexpr uint32_t kTogether = kAcross ? kWidth : kWidth / 2;
  static constexpr bool kBits = kByBits<H>;
  static_assert(kRotaryDim % (2 * kWidth) == 0 && kRotaryBegin % kWidth == 0 && kDim % kWidth == 0);

  // The first element of vector v (0 or 1) of pair p; kDim or more where there is none.
  __device__ static constexpr uint32_t element(uint32_t p, uint32_t v) {
    if constexpr (kBits && kRotaryDim > 0) {
      const uint32_t i = p % kRotaryPairs, first = kNeox || kWidth > 1 ? i * kWidth + v * (kRotaryDim / 2) : 2 * i + v;
      return first + (p / kRotaryPairs ^ kRotaryBegin / kRotaryDim) * kRotaryDim;
    }
    if (p < kRotaryPairs) return kRotaryBegin + (kNeox || kWidth > 1 ? p * kWidth + v * (kRotaryDim / 2) : 2 * p + v);
    if (p >= kPairs) return kDim;
    const uint32_t rest = (p - kRotaryPairs + v * (kPairs - kRotaryPairs)) * kWidth;
    if constexpr (kRotaryBegin > 0) {
      if (rest < kRotaryBegin) return rest;
    }
    return rest + kRotaryDim;
  }

  // Where the angle of RoPE pair i waits among those of its row: lanes that read together read neighbours.
  __device__ static constexpr uint32_t angle(uint32_t i) {
    return i % kTogether * (kRotaryDim / 2 / kTogether) + i / kTogether;
  }
};

// N neighbours as f32, in accesses of at most 16 bytes.
template <uint32_t N, typename T>
__device__ __forceinline__ void read(float (&x)[N], const T* p) {
  Vec<T, N> raw;
  load<(N * sizeof(T) > 16 ? 16 / sizeof(T) : N)>(raw, p);
  unpack<T>(x, raw);
}

// N neighbours rounded to T, by one access. 16 bytes are spelled out: NVRTC tears some of such stores apart.
template <uint32_t N, typename T>
__device__ __forceinline__ void write(T* p, const float (&x)[N]) {
  Raw<T, N> raw;
  pack<T>(raw, x);
  if constexpr (sizeof(raw) == 16) {
    const auto& words = *(const Vec<uint32_t, 4>*)&raw;
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(p)), "r"(words.e[0]), "r"(words.e[1]), "r"(words.e[2]), "r"(words.e[3]) : "memory");
  } else {
    *(Raw<T, N>*)p = raw;
  }
}

// Loads elements of a segment of the cache, dequantized; the page is valid.
template <typename S, uint32_t N, typename Cache, typename Page>
__device__ __forceinline__ void take(float (&x)[N], const Cache& cache, const Page& page, uint32_t token, uint32_t head, uint32_t dim) {
  Vec<float, N> values;
  load_elements<S>(values, cache, page, token, head, dim);
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) x[i] = values.e[i];
}

template <uint32_t kLanes>
__device__ __forceinline__ float reduce_sum(float x, uint32_t mask) {
#pragma unroll
  for (uint32_t step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(mask, x, step);
  return x;
}

// 1 / sqrt(x), within about a unit of the last place.
__device__ __forceinline__ float rsqrt_f32(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return x < infinity() ? fmaf(0.5f * y, fmaf(-x * y, y, 1.0f), y) : y;
}

// 1 / the root of a mean square.
__device__ __forceinline__ float rms_factor(float squares, float count, float eps) { return rsqrt_f32(squares / count + eps); }

// A lane's elements of a head; elements past its dims are 0.
template <typename H>
struct Head {
  using W = HeadLayout<H>;
  float x[W::kChunks][2][W::kWidth];

  // Calls each(vector, its first element) for the vectors that there are.
  template <typename Each>
  __device__ __forceinline__ void vectors(uint32_t lane, const Each& each) {
#pragma unroll
    for (uint32_t c = 0; c < W::kChunks; ++c)
#pragma unroll
      for (uint32_t v = 0; v < 2; ++v) {
        const uint32_t e = W::element(c * W::kLanes + lane, v);
        if (e < W::kDim) each(x[c][v], e);
      }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t c = 0; c < W::kChunks; ++c)
#pragma unroll
      for (uint32_t v = 0; v < 2; ++v)
#pragma unroll
        for (uint32_t j = 0; j < W::kWidth; ++j) x[c][v][j] = 0.0f;
  }

  template <typename T>
  __device__ __forceinline__ void load(const T* head, uint32_t lane) {
    clear();
    vectors(lane, [&](float (&at)[W::kWidth], uint32_t e) { read(at, head + e); });
  }

  // The head's dims in a segment of the cache, where they begin at `begin`.
  template <typename S, typename Cache, typename Page>
  __device__ __forceinline__ void take(const Cache& cache, const Page& page, uint32_t token, uint32_t head, uint32_t begin, uint32_t lane) {
    clear();
    vectors(lane, [&](float (&at)[W::kWidth], uint32_t e) { ::take<S>(at, cache, page, token, head, begin + e); });
  }

  template <typename T>
  __device__ __forceinline__ void add(const T* bias, uint32_t lane) {
    vectors(lane, [&](float (&at)[W::kWidth], uint32_t e) {
      float b[W::kWidth];
      read(b, bias + e);
#pragma unroll
      for (uint32_t j = 0; j < W::kWidth; ++j) at[j] += b[j];
    });
  }

  // The sum of the squares of the head's first kCount elements that this lane has.
  template <uint32_t kCount>
  __device__ __forceinline__ float squares(uint32_t lane) {
    float sum = 0.0f;
    vectors(lane, [&](float (&at)[W::kWidth], uint32_t e) {
#pragma unroll
      for (uint32_t j = 0; j < W::kWidth; ++j)
        if (kCount >= W::kDim || e + j < kCount) sum = fmaf(at[j], at[j], sum);
    });
    return sum;
  }

  // RMS norm of the head's first N::kCount elements, in all lanes of the head. N, spelled out in the kernel, has kCount, kEps,
  // kOffset (of the weights) and the type Cast to which heads are rounded before the weights: float, not at all.
  template <typename N, typename Weight>
  __device__ __forceinline__ void norm(const Weight* weight, uint32_t lane) {
    const uint32_t mask = 0xffffffffu >> (32 - W::kLanes) << (threadIdx.x % 32 - lane);
    norm_by<N>(rms_factor(reduce_sum<W::kLanes>(squares<N::kCount>(lane), mask), (float)N::kCount, N::kEps), weight, lane);
  }
  // norm by a given `factor`, if the sum of squares is over more than the head.
  template <typename N, typename Weight>
  __device__ __forceinline__ void norm_by(float factor, const Weight* weight, uint32_t lane) {
    constexpr uint32_t kCount = N::kCount < W::kDim ? N::kCount : W::kDim;
    constexpr uint32_t kRead = within_block(W::kWidth, kCount);  // weights that surely lie together
    vectors(lane, [&](float (&at)[W::kWidth], uint32_t e) {
#pragma unroll
      for (uint32_t j = 0; j < W::kWidth; j += kRead) {
        if (kCount < W::kDim && e + j >= kCount) continue;
        float w[kRead];
        read(w, weight + e + j);
#pragma unroll
        for (uint32_t i = 0; i < kRead; ++i) {
          const float y = at[j + i] * factor;
          at[j + i] = (kSame<typename N::Cast, float> ? y : to_f32(from_f32<typename N::Cast>(y))) * (w[i] + N::kOffset);
        }
      }
    });
  }

  // RoPE; `angles` are (cos, sin) of the row's pairs, each where W::angle says.
  __device__ __forceinline__ void rotate(const float2* angles, uint32_t lane) {
    constexpr uint32_t kStep = W::kRotaryPairs * (W::kAcross ? 1 : 2);
#pragma unroll
    for (uint32_t c = 0; c < W::kChunks; ++c) {
      const uint32_t p = c * W::kLanes + lane;
      if (p >= W::kRotaryPairs) continue;
      if constexpr (W::kAcross) {
#pragma unroll
        for (uint32_t j = 0; j < W::kWidth; ++j) rotate_pair(x[c][0][j], x[c][1][j], angles[j * kStep + p]);
      } else {
#pragma unroll
        for (uint32_t v = 0; v < 2; ++v)
#pragma unroll
          for (uint32_t j = 0; j < W::kWidth; j += 2) rotate_pair(x[c][v][j], x[c][v][j + 1], angles[j / 2 * kStep + p + v * W::kRotaryPairs]);
      }
    }
  }

  __device__ static __forceinline__ void rotate_pair(float& a, float& b, float2 angle) {
    const float first = a * angle.x - b * angle.y;
    b = b * angle.x + a * angle.y;
    a = first;
  }
};
