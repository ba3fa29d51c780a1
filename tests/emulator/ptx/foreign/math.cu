// Library functions in both precisions; compiled twice, plainly and with -use_fast_math.
template <typename T> struct Row { T v[12]; };

extern "C" __global__ void singles(float* out, const float* x, const float* y, int n) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  const float a = x[t], b = y[t];
  float* row = out + t * 12;
  row[0] = sinf(a), row[1] = cosf(a), row[2] = expf(a), row[3] = logf(b), row[4] = powf(b, a), row[5] = sqrtf(b);
  row[6] = a / b, row[7] = rsqrtf(b), row[8] = tanhf(a), row[9] = erff(a), row[10] = exp2f(a), row[11] = fmaf(a, b, -a);
}
extern "C" __global__ void doubles(double* out, const double* x, const double* y, int n) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  const double a = x[t], b = y[t];
  double* row = out + t * 12;
  row[0] = sin(a), row[1] = cos(a * 1e4), row[2] = exp(a), row[3] = log(b), row[4] = pow(b, a), row[5] = cbrt(a);
  row[6] = a / b, row[7] = rsqrt(b), row[8] = tanh(a), row[9] = erf(a), row[10] = lgamma(b), row[11] = fmod(a, b);
}
