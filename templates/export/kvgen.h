// What the headers of all exported sets share: element types, block counts, and one launch.
//
// C++17 over the CUDA driver API (cuda.h of CUDA 12.0 or newer). Nothing here allocates, waits or throws.
#ifndef KVGEN_EXPORT_H
#define KVGEN_EXPORT_H 1

#include <cuda.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if CUDA_VERSION < 12000
#error "kvgen.h needs cuda.h of CUDA 12.0 or newer"
#endif

namespace kvgen {

// Elements of device memory. The host passes their addresses and never computes with them, so each is its bits alone. They are
// types of their own: memory of bf16 given where a kernel reads f16 does not compile.
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };
struct e8m0 { uint8_t bits; };  // of scales
struct e2m1x2 { uint8_t bits; };  // two 4-bit elements, element 2i in the low half
struct i4x2 { uint8_t bits; };
struct u4x2 { uint8_t bits; };
struct u2x4 { uint8_t bits; };
struct u3 { uint8_t bits; };

// An address of the driver API as a typed one: device_pointer<kvgen::bf16>(memory).
template <typename T>
T* device_pointer(CUdeviceptr address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// What a cubin was compiled for. A kernel file for it is called <kernel>.<name_of(arch)>.cubin.
enum class Arch { sm_80, sm_89, sm_90a, sm_100f, sm_120f };

constexpr const char* name_of(Arch arch) {
  switch (arch) {
    case Arch::sm_80: return "sm_80";
    case Arch::sm_89: return "sm_89";
    case Arch::sm_90a: return "sm_90a";
    case Arch::sm_100f: return "sm_100f";
    case Arch::sm_120f: return "sm_120f";
  }
  return "";
}

// Whether a GPU of this compute capability runs cubins of `arch`.
constexpr bool runs_on(Arch arch, int major, int minor) {
  switch (arch) {
    case Arch::sm_80: return major == 8;
    case Arch::sm_89: return major == 8 && minor == 9;
    case Arch::sm_90a: return major == 9 && minor == 0;
    case Arch::sm_100f: return major == 10;
    case Arch::sm_120f: return major == 12;
  }
  return false;
}

// Kernels of these architectures wait by themselves for the kernel before them in the stream (griddepcontrol.wait), so that
// launches may overlap: programmatic dependent launch.
constexpr bool overlaps(Arch arch) { return arch != Arch::sm_80 && arch != Arch::sm_89; }

// What kernels report of wrong device data, by the error word that launches got as `errors`: one uint64_t in device memory, which the
// host sets to 0, copies back when it likes, and sets to 0 again. It keeps the first fault in the order of position and request.
enum class Fault : uint8_t {
  none = 0,
  page_id = 1,      // a page id outside the pool
  position = 2,     // a token past the request's page table, or past the angles of RoPE
  length = 3,       // a length that the page table or this step's rows cannot have
  slot = 4,         // row `position` has a slot outside the pool
  row_offsets = 5,  // offsets that decrease, pass the rows, or give a request too many rows
  table = 6,        // an index into the page table that leaves it
  lora_end = 7,     // lora_end_idx counts rows that this step does not have
  pair = 8,         // pair `position` names a page outside its pool
  overlap = 9,      // pair `position` writes to a page that another pair reads or writes
  plan = 10,        // a workspace without a plan for this operation, batch and rows, or one that was overwritten
  stale = 11,       // a request of another length than its step was planned with
  scale = 12,       // a scale of the caller's that is 0, negative or not finite
};

constexpr const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::none: return "none";
    case Fault::page_id: return "page_id";
    case Fault::position: return "position";
    case Fault::length: return "length";
    case Fault::slot: return "slot";
    case Fault::row_offsets: return "row_offsets";
    case Fault::table: return "table";
    case Fault::lora_end: return "lora_end";
    case Fault::pair: return "pair";
    case Fault::overlap: return "overlap";
    case Fault::plan: return "plan";
    case Fault::stale: return "stale";
    case Fault::scale: return "scale";
  }
  return "no fault that kernels report: the word was not 0 before the first launch";
}

// A decoded error word: the fault, its request (0xffffff: that one or a later one), and the token, row or pair.
struct Report {
  Fault fault;
  uint32_t request, position;
};

constexpr Report report_of(uint64_t word) {
  return word == 0 ? Report{Fault::none, 0, 0}
                   : Report{static_cast<Fault>(~word & 0xff), static_cast<uint32_t>(~word >> 8 & 0xffffff),
                            static_cast<uint32_t>(~word >> 32)};
}

// A number of blocks while a grid is worked out: whole numbers of 64 bits that say when they went wrong, by a division by 0,
// below 0 or past 64 bits.
struct Blocks {
  uint64_t number = 0;
  bool valid = true;

  constexpr Blocks(uint64_t n, bool good = true) : number(n), valid(good) {}
};

// A size or a count as a number of blocks; a negative one is not valid.
template <typename T>
constexpr Blocks blocks(T size) {
  return {static_cast<uint64_t>(size), !(size < T{1}) || size == T{0}};
}

constexpr Blocks operator+(Blocks a, Blocks b) {
  return {a.number + b.number, a.valid && b.valid && a.number + b.number >= a.number};
}
constexpr Blocks operator-(Blocks a, Blocks b) {
  return {a.number - b.number, a.valid && b.valid && a.number >= b.number};
}
constexpr Blocks operator*(Blocks a, Blocks b) {
  return {a.number * b.number, a.valid && b.valid && (a.number == 0 || a.number * b.number / a.number == b.number)};
}
constexpr Blocks operator/(Blocks a, Blocks b) {
  return {b.number == 0 ? 0 : a.number / b.number, a.valid && b.valid && b.number != 0};
}
constexpr Blocks operator%(Blocks a, Blocks b) {
  return {b.number == 0 ? 0 : a.number % b.number, a.valid && b.valid && b.number != 0};
}
constexpr Blocks ceil_div(Blocks a, Blocks b) {
  return {b.number == 0 ? 0 : a.number / b.number + (a.number % b.number != 0), a.valid && b.valid && b.number != 0};
}
constexpr Blocks least(Blocks a, Blocks b) { return {a.number < b.number ? a.number : b.number, a.valid && b.valid}; }
constexpr Blocks most(Blocks a, Blocks b) { return {a.number < b.number ? b.number : a.number, a.valid && b.valid}; }

// The grid of a launch, in blocks.
struct Grid {
  Blocks x, y, z;

  // Whether the driver takes it, or there is nothing to launch.
  constexpr bool valid() const {
    return x.valid && y.valid && z.valid && x.number < uint64_t{1} << 31 && y.number < 65536 && z.number < 65536;
  }
  constexpr bool empty() const { return x.number == 0 || y.number == 0 || z.number == 0; }
};

// The pages of every layer of a pool, by value: address and stride in bytes of each page pointer.
template <uint32_t kPointers, uint32_t kLayers>
struct PageAddresses {
  uint8_t* first[kPointers][kLayers] = {};
  int64_t stride[kPointers] = {};
  uint32_t num_layers = 0, num_pages = 0, num_scale_pages = 0, page_tokens = 0;
};

// A tensor map as kernels take it, by value; what cuTensorMapEncodeTiled made is assigned to it. (The alignment of CUtensorMap itself
// differs between versions of cuda.h.)
struct alignas(64) TensorMap {
  unsigned char bytes[128] = {};

  TensorMap() = default;
  TensorMap(const CUtensorMap& encoded) {
    static_assert(sizeof(CUtensorMap) == sizeof(bytes), "128 bytes in every version");
    memcpy(bytes, &encoded, sizeof(bytes));
  }
};

// Where an argument lies, as the driver takes it.
template <typename T>
void* address_of(const T& argument) {
  return const_cast<void*>(static_cast<const void*>(&argument));
}

// The address `elements` behind `first`; null stays null.
template <typename Member, typename T>
Member* offset_by(T* first, uint64_t elements) {
  return first == nullptr ? nullptr : reinterpret_cast<Member*>(first + elements);
}

template <typename T>
bool aligned(const T* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// The function of a kernel in a module that its cubin was loaded to, ready to be launched: dynamic shared memory past 48 KB has
// to be allowed once. All kernels ask for the same division of a multiprocessor's memory, the most shared memory: it changes only
// while the multiprocessor is empty, so another one would keep launches from overlapping. Load before a stream captures a graph.
template <typename Kernel>
CUresult load(CUfunction* function, CUmodule module, Arch arch) {
  CUresult found = cuModuleGetFunction(function, module, Kernel::entry);
  if (found == CUDA_SUCCESS)
    found = cuFuncSetAttribute(*function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_SHAREDMEM_CARVEOUT_MAX_SHARED);
  if (found != CUDA_SUCCESS || Kernel::shared_bytes(arch) <= 48 * 1024) return found;
  return cuFuncSetAttribute(*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                            static_cast<int>(Kernel::shared_bytes(arch)));
}

// Launches on `stream` in the current context and returns at once. An empty grid launches nothing, which is no error; a grid
// that no GPU takes gives CUDA_ERROR_INVALID_VALUE.
inline CUresult launch(CUfunction function, CUstream stream, Arch arch, const Grid& grid, uint32_t threads,
                       uint32_t shared_bytes, void** parameters) {
  if (!grid.valid()) return CUDA_ERROR_INVALID_VALUE;
  if (grid.empty()) return CUDA_SUCCESS;
  CUlaunchAttribute overlap{};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(grid.x.number);
  config.gridDimY = static_cast<unsigned>(grid.y.number);
  config.gridDimZ = static_cast<unsigned>(grid.z.number);
  config.blockDimX = threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = shared_bytes;
  config.hStream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps(arch) ? 1 : 0;
  return cuLaunchKernelEx(&config, function, parameters, nullptr);
}

}  // namespace kvgen

#endif  // KVGEN_EXPORT_H
