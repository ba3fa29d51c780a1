// print.cpp - printf and assert of device code. Each block's text is kept until the launch ends and then joined in the
// blocks' order, so that it does not depend on how many workers ran them.
#include "runtime.h"
#include <map>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <string>

namespace {
constexpr size_t BLOCK_BYTES = 1u << 20, LAUNCH_BYTES = 16u << 20;  // of text, as an endless loop may print without end
constexpr long long MOST_WIDTH = 4096;
struct Text {
  std::string kept;
  bool cut;
};
pthread_mutex_t print_lock = PTHREAD_MUTEX_INITIALIZER;
std::map<u64, Text> printed;  // by ticket
std::string joined;

u8 byte_at(u64 address, u32 site) { return *at_generic(worker->current, address, 1, A_READ | A_GENERIC, site); }
std::string string_at(u64 address, u32 site, size_t most = BLOCK_BYTES) {
  std::string out;
  while (out.size() < most) {
    const char c = (char)byte_at(address++, site);
    if (!c) break;
    out += c;
  }
  return out;
}
struct Arguments {  // laid out as a C struct
  u64 at;
  u32 site;
  template <class T> T next() {
    at = (at + sizeof(T) - 1) & ~(u64)(sizeof(T) - 1);
    T v = load<T>(at_generic(worker->current, at, sizeof(T), A_READ | A_GENERIC, site));
    at += sizeof(T);
    return v;
  }
};
__attribute__((format(printf, 2, 3))) void add(std::string& out, const char* format, ...) {
  va_list list, again;
  va_start(list, format);
  va_copy(again, list);
  const int n = vsnprintf(nullptr, 0, format, list);
  va_end(list);
  const size_t before = out.size();
  out.resize(before + (size_t)n + 1);
  vsnprintf(&out[before], (size_t)n + 1, format, again);
  va_end(again);
  out.resize(before + (size_t)n);
}
struct Conversion {
  std::string flags, length;
  long long width = -1, precision = -1;
  char letter = 0;
  std::string host(const char* type) const {  // the same conversion for the host's printf
    std::string out = "%" + flags;
    if (width >= 0) out += std::to_string(width);
    if (precision >= 0) out += "." + std::to_string(precision);
    return out + type;
  }
};
size_t number(const std::string& f, size_t i, long long* value, Arguments& a, u32* taken) {
  if (f[i] == '*') {
    *value = a.next<s32>(), ++*taken;
    return i + 1;
  }
  for (*value = 0; f[i] >= '0' && f[i] <= '9'; i++) *value = *value < MOST_WIDTH ? *value * 10 + (f[i] - '0') : *value;
  return i;
}
size_t parse(const std::string& f, size_t i, Conversion* c, Arguments& a, u32* taken) {  // from after the %
  while (f[i] && strchr("-+ #0", f[i])) c->flags += f[i++];
  if (f[i] == '*' || (f[i] >= '1' && f[i] <= '9')) {
    i = number(f, i, &c->width, a, taken);
    if (c->width < 0) c->flags += '-', c->width = -c->width;
  }
  if (f[i] == '.') i = number(f, i + 1, &c->precision, a, taken);
  while (f[i] && strchr("hljzt", f[i])) c->length += f[i++];
  c->letter = f[i];
  c->width = c->width > MOST_WIDTH ? MOST_WIDTH : c->width;
  c->precision = c->precision > MOST_WIDTH ? MOST_WIDTH : c->precision;
  return f[i] ? i + 1 : i;
}
bool convert(std::string& out, const Conversion& c, Arguments& a) {
  const bool is_long = !c.length.empty() && c.length[0] != 'h';
  const int narrow = c.length == "hh" ? 8 : c.length == "h" ? 16 : 32;
  switch (c.letter) {
    case 'd': case 'i': {
      const long long v = is_long ? a.next<s64>() : (long long)(a.next<s32>() << (32 - narrow) >> (32 - narrow));
      add(out, c.host("lld").c_str(), v);
      return true;
    }
    case 'u': case 'x': case 'X': case 'o': {
      const unsigned long long v = is_long ? a.next<u64>() : a.next<u32>() << (32 - narrow) >> (32 - narrow);
      const char type[] = {'l', 'l', c.letter, 0};
      add(out, c.host(type).c_str(), v);
      return true;
    }
    case 'e': case 'E': case 'f': case 'F': case 'g': case 'G': case 'a': case 'A': {
      const char type[] = {c.letter, 0};
      add(out, c.host(type).c_str(), a.next<double>());
      return true;
    }
    case 'c': add(out, c.host("c").c_str(), a.next<s32>()); return true;
    case 'p': add(out, c.host("p").c_str(), (void*)a.next<u64>()); return true;
    case 's': {
      const u64 text = a.next<u64>();
      const std::string s = text ? string_at(text, a.site, c.precision >= 0 ? (size_t)c.precision : BLOCK_BYTES) : "(null)";
      add(out, c.host("s").c_str(), s.c_str());
      return true;
    }
  }
  return false;
}
}  // namespace

void emu_vprintf(const u8* params, u8* results, u32 site) {
  const u64 format = load<u64>(params);
  Arguments a{load<u64>(params + 8), site};
  if (!format) return store<s32>(results, -1);
  const std::string f = string_at(format, site);
  std::string out;
  u32 taken = 0;
  for (size_t i = 0; i < f.size();) {
    if (f[i] != '%') {
      out += f[i++];
      continue;
    }
    Conversion c;
    const size_t end = parse(f, i + 1, &c, a, &taken);
    if (c.letter == '%') out += '%';
    else if (convert(out, c, a)) taken++;
    else out += f.substr(i, end - i);
    i = end;
  }
  store<s32>(results, (s32)taken);
  pthread_mutex_lock(&print_lock);
  Text& text = printed[worker->ticket];
  if (text.kept.size() + out.size() > BLOCK_BYTES) text.cut = true;
  else text.kept += out;
  pthread_mutex_unlock(&print_lock);
}
void emu_assert_failed(const u8* params, u8*, u32 site) {
  const std::string message = string_at(load<u64>(params), site), file = string_at(load<u64>(params + 8), site), function = string_at(load<u64>(params + 24), site);
  fault("assert", site, nullptr, "%s:%u: %s: assertion `%s` failed", file.c_str(), load<u32>(params + 16), function.c_str(), message.c_str());
}

void print_begin_launch() {
  printed.clear();
  joined.clear();
}
void print_end_launch(u64 last_ticket) {  // what later clusters printed never happened
  bool cut = false;
  for (const auto& block : printed) {
    if (block.first > last_ticket) break;
    cut |= block.second.cut || joined.size() + block.second.kept.size() > LAUNCH_BYTES;
    if (joined.size() + block.second.kept.size() <= LAUNCH_BYTES) joined += block.second.kept;
  }
  if (cut) add(joined, "... some of what the launch printed is left out: %zu bytes a block, %zu in all are kept\n", BLOCK_BYTES, LAUNCH_BYTES);
}
// What the last launch printed; valid until the next one.
extern "C" __attribute__((visibility("default"))) const char* emu_printed(u64* bytes) {
  *bytes = joined.size();
  return joined.data();
}
