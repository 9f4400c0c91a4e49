// The machine that translated kernels run on. A launch's blocks run one after another, or several in turns, in an order that
// differs from launch to launch, as does the order of a block's threads. A thread runs until it waits for others (a
// barrier, a shuffle) and goes on when they have come. Every access to memory is checked. What a device would do to a
// wrong kernel in silence, a Fault says here, with the line of its source.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "instructions.h"

struct Fault : std::runtime_error {
  using runtime_error::runtime_error;
};

constexpr u32 WARP_THREADS = 32, MOST_THREADS = 1024;
constexpr u64 SHARED_WINDOW = 1u << 24;  // a block's shared addresses lie below; one rank of a cluster after another

struct Dimensions {
  u32 x = 1, y = 1, z = 1;
  u64 count() const { return u64(x) * y * z; }
};

enum Waiting { NOTHING, WARP, BARRIER, CLUSTER, TURN, ENDED };
enum Collective { SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, SHUFFLE_INDEX, VOTE_ANY, VOTE_ALL, VOTE_BALLOT, ADD, MIN, MAX, SYNC };

struct Block;

struct Thread {
  Block* block;
  Dimensions index;
  u32 number, lane, at = 0;  // where it goes on
  Waiting waiting = NOTHING;
  const char* where = "";  // it waits, by source line and instruction
  u32 members = 0, barrier = 0, expected = 0;
  Collective collective = SYNC;
  u32 value = 0, source = 0, clamp = 0;  // brought to a collective; afterwards value is its result
  bool holds = false;
  bool has_arrived = false;  // at the cluster's barrier
  u64* saved = nullptr;
  char* local = nullptr;
};

struct Access {
  u32 thread = 0;  // counted from 1 and over the blocks of a cluster; 0 is none
  u32 barriers = 0, exchanges = 0;  // how many the block, and the thread's warp, had passed
};

// What has happened to a byte of shared memory.
struct SharedByte {
  bool written = false;
  Access writer, readers[2];  // the last two that are different threads
  void add_reader(const Access& reader) {
    if (readers[0].thread != reader.thread) readers[1] = readers[0];
    readers[0] = reader;
  }
};

struct Kernel {
  const char* name;
  void (*run)(Thread&);
  u32 saved_words, shared_bytes, local_bytes, most_threads;
};

struct Launch {
  const Kernel* kernel;
  Dimensions grid, block, cluster;
  char* const* parameters;
  u32 dynamic_shared;
};

struct Block {
  const Launch* launch;
  Dimensions index;
  u32 rank = 0;  // in its cluster
  u8 tag;        // marks what it wrote to global memory
  bool has_fenced = false;
  std::vector<Block*>* cluster;
  std::vector<Thread> threads;
  std::vector<u32> order;  // in which its threads run
  std::vector<u64> saved;
  std::vector<char> local;
  std::unique_ptr<char[]> shared;
  std::vector<SharedByte> shared_bytes;
  u32 barriers = 0;                 // passed by the whole block
  std::vector<u32> warp_exchanges;  // by each warp
};

// ---- memory. KIND: what an access promises to others.

enum Kind { LOAD, STORE, ATOMIC };

// The place in host memory of a device address, or a Fault.
char* global_place(Thread& thread, u64 address, u32 bytes, Kind kind, bool strong, const char* where);
char* shared_place(Thread& thread, u64 address, u32 bytes, Kind kind, bool strong, const char* where);
char* local_place(Thread& thread, u64 address, u32 bytes, const char* where);
char* generic_place(Thread& thread, u64 address, u32 bytes, Kind kind, bool strong, const char* where);
void fence(Thread& thread);
void forget_marks_of_launch();

template <class T>
T load(const char* place) {
  T value;
  memcpy(&value, place, sizeof(T));
  return value;
}
template <class T>
void store(char* place, T value) {
  memcpy(place, &value, sizeof(T));
}
template <class T, class F>
T update(char* place, F f) {
  const T before = load<T>(place);
  store(place, f(before));
  return before;
}

[[noreturn]] void fault(const Thread& thread, const std::string& what, const char* where);
[[noreturn]] void failed_assertion(const Thread& thread, u64 text, u64 file, u32 line);

template <class T>
T divisor(const Thread& thread, T x, const char* where) {
  if constexpr (IS_INTEGER<T>) {
    if (x == 0) fault(thread, "divides an integer by zero", where);
  }
  return x;
}

// ---- waiting: translated code sets what it waits for, saves its registers and returns

inline void wait_at_barrier(Thread& thread, u32 barrier, u32 expected, const char* where) {
  thread.waiting = BARRIER, thread.barrier = barrier, thread.expected = expected, thread.where = where;
}
inline void wait_in_warp(Thread& thread, Collective what, u32 members, u32 value, u32 source, u32 clamp, const char* where) {
  thread.waiting = WARP, thread.collective = what, thread.members = members, thread.where = where;
  thread.value = value, thread.source = source, thread.clamp = clamp;
}
inline void wait_for(Thread& thread, Waiting what, const char* where) { thread.waiting = what, thread.where = where; }

// ---- launches

void add_kernel(const Kernel& kernel);
const Kernel* kernel_named(const std::string& name);
void run(const Launch& launch);

extern "C" {
// Memory that kernels may touch, which begins as never written unless `written`.
void emulation_add_memory(void* begin, size_t bytes, bool written);
void emulation_remove_memory(void* begin);
void emulation_mark_written(void* anywhere_in_it);
// Of the launches that follow: 0 runs blocks and threads in ascending order, 1 in descending, more in one of many others.
void emulation_set_order(u64 order);
// Null, or what is wrong, of a grid of (blocks, rows); `parameters` as a launch passes them.
const char* emulation_launch(
    const char* kernel, u32 blocks, u32 rows, u32 threads, u32 cluster, char* const* parameters);
}
