// Checks every access of a kernel: is it inside memory that was allocated, aligned, written before it is read, and free of
// races between threads. Shared memory is watched byte by byte since the last barrier. In global memory a byte that one
// block wrote may be read by another in the same launch only after fences on both sides.
#include <array>
#include <map>

#include "machine.h"

namespace {

constexpr u8 NEVER_WRITTEN = 0, WRITTEN_BEFORE = 1;  // more: by a block of this launch, its tag

struct Region {
  u64 begin, end;
  std::unique_ptr<u8[], decltype(&free)> marks{nullptr, &free};  // of each byte; null while all were written before
  bool marked_in_launch = false;
};

// By the address behind the last byte.
std::map<u64, Region>& regions() {
  static std::map<u64, Region> all;  // translated code adds its variables before main
  return all;
}

Region* recent = nullptr;
bool fenced_since_store[256];  // by tag

void make_marks(Region& region) {
  if (region.marks) return;
  region.marks.reset(static_cast<u8*>(malloc(region.end - region.begin)));
  memset(region.marks.get(), WRITTEN_BEFORE, region.end - region.begin);
}

Region* region_of(u64 address, u32 bytes) {
  if (!recent || address < recent->begin || address + bytes > recent->end) {
    const auto found = regions().upper_bound(address);
    if (found == regions().end()) return nullptr;
    recent = &found->second;
  }
  return address >= recent->begin && address + bytes <= recent->end ? recent : nullptr;
}

const char* verb(Kind kind) { return kind == LOAD ? "reads " : kind == STORE ? "writes " : "updates "; }

std::string nearest(u64 address) {
  const auto found = regions().upper_bound(address);
  if (found != regions().end() && address >= found->second.begin) {
    return std::to_string(found->second.end - address) + " bytes before the end of its tensor";
  }
  if (found != regions().begin()) {
    const Region& below = std::prev(found)->second;
    if (address - below.end < (1 << 20)) return std::to_string(address - below.end) + " bytes behind a tensor's end";
  }
  return "far from any tensor";
}

void check_aligned(Thread& thread, u64 address, u32 bytes, Kind kind, const char* space, const char* where) {
  if (address % bytes == 0) return;
  fault(
      thread, std::string(verb(kind)) + std::to_string(bytes) + " bytes of " + space + " memory at an address that is " +
      std::to_string(address % bytes) + " past a multiple of " + std::to_string(bytes), where);
}

// A byte that is not of before the launch: never written, or by a block of this launch.
void check_mark(Thread& thread, u8 mark, Kind kind, const char* where) {
  if (mark == NEVER_WRITTEN && kind != STORE) fault(thread, "reads global memory that was never written", where);
  if (mark <= WRITTEN_BEFORE || mark == thread.block->tag || kind == ATOMIC) return;
  if (kind == STORE) fault(thread, "writes a byte of global memory that another block wrote in this launch", where);
  if (!fenced_since_store[mark]) fault(thread, "reads what another block wrote, which has not fenced since", where);
  if (!thread.block->has_fenced) fault(thread, "reads what another block wrote, without a fence of its own before", where);
}

// Whether nothing orders an earlier access of another thread before mine: no barrier, no exchange of the warp of both.
bool races(const Access& other, const Access& mine) {
  if (!other.thread || other.thread == mine.thread || other.barriers != mine.barriers) return false;
  const bool same_warp = (other.thread - 1) / WARP_THREADS == (mine.thread - 1) / WARP_THREADS;
  return !same_warp || other.exchanges == mine.exchanges;
}

void check_order(Thread& thread, const SharedByte& byte, const Access& mine, Kind kind, const char* where) {
  auto refuse = [&](const Access& other, const char* did) {
    const std::string name = std::to_string((other.thread - 1) % MOST_THREADS);
    fault(thread, std::string(verb(kind)) + "shared memory that thread " + name + did + " with no barrier between", where);
  };
  if (races(byte.writer, mine)) refuse(byte.writer, " wrote");
  if (kind == LOAD) return;
  for (const Access& reader : byte.readers) {
    if (races(reader, mine)) refuse(reader, " read");
  }
}

}  // namespace

char* global_place(Thread& thread, u64 address, u32 bytes, Kind kind, bool strong, const char* where) {
  check_aligned(thread, address, bytes, kind, "global", where);
  Region* region = region_of(address, bytes);
  if (!region) {
    fault(thread, std::string(verb(kind)) + std::to_string(bytes) + " bytes of global memory " + nearest(address), where);
  }
  if (kind == LOAD && !region->marks) return reinterpret_cast<char*>(address);
  make_marks(*region);
  u8* marks = region->marks.get() + (address - region->begin);
  static constexpr auto ALL_BEFORE = [] {
    std::array<u8, 32> ones{};
    ones.fill(WRITTEN_BEFORE);
    return ones;
  }();
  if (memcmp(marks, ALL_BEFORE.data(), bytes) != 0) {
    for (u32 i = 0; i < bytes; i++) check_mark(thread, marks[i], kind, where);
  }
  if (kind == STORE && !strong) {
    memset(marks, thread.block->tag, bytes);
    region->marked_in_launch = true;
    fenced_since_store[thread.block->tag] = false;
  } else if (kind == STORE) {
    memset(marks, WRITTEN_BEFORE, bytes);  // a strong store is no race
  }
  return reinterpret_cast<char*>(address);
}

void fence(Thread& thread) {
  thread.block->has_fenced = true;
  fenced_since_store[thread.block->tag] = true;
}

void forget_marks_of_launch() {
  for (auto& [end, region] : regions()) {
    if (!region.marked_in_launch) continue;
    for (u64 i = 0; i < region.end - region.begin; i++) region.marks[i] = std::min(region.marks[i], WRITTEN_BEFORE);
    region.marked_in_launch = false;
  }
}

char* shared_place(Thread& thread, u64 address, u32 bytes, Kind kind, bool strong, const char* where) {
  check_aligned(thread, address, bytes, kind, "shared", where);
  Block* block = thread.block;
  if (address >= SHARED_WINDOW) {
    const u64 rank = address / SHARED_WINDOW - 1;
    if (rank >= block->cluster->size()) fault(thread, "names a block that its cluster does not have", where);
    block = (*block->cluster)[rank];
  }
  const u64 offset = address % SHARED_WINDOW;
  if (offset + bytes > block->shared_bytes.size()) {
    fault(
        thread, std::string(verb(kind)) + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
        " of shared memory, of which the block has " + std::to_string(block->shared_bytes.size()), where);
  }
  const Access mine = {
      thread.block->rank * MOST_THREADS + thread.number + 1, block->barriers,
      thread.block->warp_exchanges[thread.number / WARP_THREADS]};
  for (u32 i = 0; i < bytes; i++) {
    SharedByte& byte = block->shared_bytes[offset + i];
    if (kind != STORE && !byte.written) fault(thread, "reads shared memory that was never written", where);
    if (!strong) check_order(thread, byte, mine, kind, where);
    if (kind != LOAD) byte.written = true;
    if (kind == LOAD && !strong) byte.add_reader(mine);
    else if (!strong) byte.writer = mine;
  }
  return block->shared.get() + offset;
}

char* local_place(Thread& thread, u64 address, u32 bytes, const char* where) {
  check_aligned(thread, address, bytes, LOAD, "local", where);
  const u64 begin = u64(thread.local), size = thread.block->launch->kernel->local_bytes;
  if (address < begin || address + bytes > begin + size) fault(thread, "is outside its local memory", where);
  return reinterpret_cast<char*>(address);
}

// An address of any space: local memory and the block's shared memory have their own ranges.
char* generic_place(Thread& thread, u64 address, u32 bytes, Kind kind, bool strong, const char* where) {
  const u64 local = u64(thread.local);
  if (address >= local && address < local + thread.block->launch->kernel->local_bytes) {
    return local_place(thread, address, bytes, where);
  }
  for (const Block* block : *thread.block->cluster) {
    const u64 shared = u64(block->shared.get());
    if (address < shared || address >= shared + block->shared_bytes.size()) continue;
    return shared_place(thread, address - shared + SHARED_WINDOW * (block->rank + 1), bytes, kind, strong, where);
  }
  return global_place(thread, address, bytes, kind, strong, where);
}

extern "C" {

void emulation_add_memory(void* begin, size_t bytes, bool written) {
  if (bytes == 0) return;
  Region region = {u64(begin), u64(begin) + bytes};
  if (!written) region.marks.reset(static_cast<u8*>(calloc(bytes, 1)));  // pages that nothing touches take no memory
  regions()[region.end] = std::move(region);
}

void emulation_remove_memory(void* begin) {
  recent = nullptr;
  const auto found = regions().upper_bound(u64(begin));
  if (found != regions().end() && found->second.begin == u64(begin)) regions().erase(found);
}

void emulation_mark_written(void* anywhere) {
  if (Region* region = region_of(u64(anywhere), 1)) region->marks.reset();
}
}
