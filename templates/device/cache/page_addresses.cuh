#pragma once

// Where the pages of every layer lie: the first one, by page pointer and layer, and how many bytes the next one lies on.
template <uint32_t kPointers, uint32_t kLayers>
struct PageAddresses {
  uint8_t* first[kPointers][kLayers];
  int64_t stride[kPointers];
  uint32_t num_layers, num_pages, num_scale_pages, page_tokens;
};
