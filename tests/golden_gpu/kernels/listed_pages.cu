// listed_pages.cuh: tokens and tiles of lists of 6 entries, pages of 24 tokens, which are 3 tiles of 8.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/attention/decode/listed_pages.cuh"

constexpr uint32_t kEntries = 6, kPage = 24;

// A warp a list, of a request of tokens[b] tokens. Three words a lane: the page of entry `lane`, the token of place 5 * lane, and tile `lane`
// where those from 2 to 9 are wanted; a fourth, whether the list failed (bit 0) or the lane has met a wrong page (bit 1).
extern "C" __global__ void listed_places(const int32_t* entries, const uint32_t* counts, const uint32_t* tokens, uint32_t* out, uint64_t* errors) {
  const uint32_t b = blockIdx.x, lane = threadIdx.x;
  bool failed = b == 1;
  const ListedPages list = listed_pages(failed, entries + b * kEntries, counts[b], kEntries, kPage, b, tokens[b], errors + b);
  uint32_t* mine = out + (b * 32 + lane) * 4;
  mine[0] = list.page(lane);
  mine[1] = list.token(5 * lane, kPage);
  mine[2] = list.tile<3>(lane, 2, 9);
  mine[3] = failed + 2 * has_wrong_page<32>(list, kPage, b, errors + b);
}
