// Runs blocks and threads, and lets threads go on that have waited for each other.
#include "machine.h"

#include <list>
#include <map>
#include <numeric>
#include <random>

namespace {

u64 order_of_launches = 0;
constexpr u64 TAGS = 254;  // of blocks: their number modulo this
constexpr int IDLE_ROUNDS = 100000;  // threads that only wait for a value for so long wait for ever

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

std::vector<u32> arranged(u64 count, u64 order) {
  std::vector<u32> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (order == 1) std::reverse(numbers.begin(), numbers.end());
  if (order > 1) std::shuffle(numbers.begin(), numbers.end(), std::mt19937(u32(order)));
  return numbers;
}

Dimensions place_of(u64 number, const Dimensions& all) {
  return {u32(number % all.x), u32(number / all.x % all.y), u32(number / all.x / all.y)};
}

using Cluster = std::vector<Block*>;

// A block's storage is used again by later blocks of the launch.
void begin_block(Block& block, u64 number, u32 rank, Cluster* cluster) {
  const Launch& launch = *block.launch;
  const Kernel& kernel = *launch.kernel;
  const u32 threads = u32(launch.block.count()), shared = kernel.shared_bytes + launch.dynamic_shared;
  block.index = place_of(number, launch.grid);
  block.rank = rank, block.cluster = cluster, block.has_fenced = false, block.barriers = 0;
  block.tag = u8(2 + number % TAGS);
  block.saved.resize(u64(threads) * kernel.saved_words);
  block.local.resize(u64(threads) * kernel.local_bytes + 16);
  block.shared.reset(new char[shared + 16]);
  block.shared_bytes.assign(shared, {});
  block.warp_exchanges.assign((threads + WARP_THREADS - 1) / WARP_THREADS, 0);
  block.threads.assign(threads, {});
  char* local = block.local.data() + (16 - u64(block.local.data()) % 16) % 16;
  for (u32 i = 0; i < threads; i++) {
    Thread& thread = block.threads[i];
    thread.block = &block, thread.index = place_of(i, launch.block), thread.number = i, thread.lane = i % WARP_THREADS;
    thread.saved = block.saved.data() + u64(i) * kernel.saved_words;
    thread.local = local + u64(i) * kernel.local_bytes;
  }
}

u32 shuffled(Thread& thread, const Thread* warp) {
  const u32 lane = thread.lane, segment = thread.clamp >> 8 & 31, last = (lane & segment) | (thread.clamp & 31 & ~segment);
  const int by = int(thread.source & 31);
  int from = int(lane);
  bool inside = true;
  if (thread.collective == SHUFFLE_UP) from = int(lane) - by, inside = from >= int(last);
  if (thread.collective == SHUFFLE_DOWN) from = int(lane) + by, inside = from <= int(last);
  if (thread.collective == SHUFFLE_XOR) from = int(lane) ^ by, inside = from <= int(last);
  if (thread.collective == SHUFFLE_INDEX) from = int((lane & segment) | (u32(by) & ~segment)), inside = from <= int(last);
  if (!inside) from = int(lane);
  thread.holds = inside;
  if (!(thread.members >> from & 1)) {
    fault(thread, "takes a value of lane " + std::to_string(from) + ", which its mask does not name", thread.where);
  }
  return warp[from].value;
}

u32 reduced(const Thread& thread, const Thread* warp) {
  u32 ballot = 0, result = thread.value;
  for (u32 lane = 0; lane < WARP_THREADS; lane++) {
    if (!(thread.members >> lane & 1)) continue;
    ballot |= u32(warp[lane].holds) << lane;
    if (lane == thread.lane) continue;
    if (thread.collective == ADD) result += warp[lane].value;
    if (thread.collective == MIN) result = std::min(result, warp[lane].value);
    if (thread.collective == MAX) result = std::max(result, warp[lane].value);
  }
  if (thread.collective == VOTE_ANY) return ballot != 0;
  if (thread.collective == VOTE_ALL) return ballot == thread.members;
  return thread.collective == VOTE_BALLOT ? ballot : result;
}

// Let lanes go on whose whole mask has come to the same instruction with the same mask.
bool release_warp(Block& block, u32 number) {
  const u32 first = number * WARP_THREADS, count = std::min(u32(block.threads.size()) - first, WARP_THREADS);
  Thread* warp = &block.threads[first];
  bool released = false;
  for (u32 leader = 0; leader < count; leader++) {
    if (warp[leader].waiting != WARP) continue;
    const u32 members = warp[leader].members;
    if (!(members >> leader & 1)) fault(warp[leader], "is not in its own mask", warp[leader].where);
    bool complete = true;
    for (u32 lane = 0; lane < WARP_THREADS; lane++) {
      if (!(members >> lane & 1)) continue;
      if (lane >= count || warp[lane].waiting == ENDED) {
        const char* why = lane >= count ? ", which the block does not have" : ", which has ended";
        fault(warp[leader], "names lane " + std::to_string(lane) + " in its mask" + why, warp[leader].where);
      }
      complete &= warp[lane].waiting == WARP && warp[lane].members == members && warp[lane].where == warp[leader].where;
    }
    if (!complete) continue;
    u32 results[WARP_THREADS] = {};
    for (u32 lane = 0; lane < count; lane++) {
      if (members >> lane & 1) {
        results[lane] = warp[lane].collective <= SHUFFLE_INDEX ? shuffled(warp[lane], warp) : reduced(warp[lane], warp);
      }
    }
    for (u32 lane = 0; lane < count; lane++) {
      if (members >> lane & 1) warp[lane].value = results[lane], warp[lane].waiting = NOTHING;
    }
    block.warp_exchanges[number]++;
    released = true;
  }
  return released;
}

std::string what_it_does(const Thread& thread) {
  return thread.waiting == ENDED ? "has ended" : std::string("waits at ") + thread.where;
}

// Let a block go on whose live threads have all come to the same barrier.
bool release_barrier(Block& block) {
  const Thread* first = nullptr;
  for (const Thread& thread : block.threads) {
    if (thread.waiting == ENDED) continue;
    if (thread.waiting != BARRIER) return false;
    if (!first) first = &thread;
    if (thread.where != first->where || thread.barrier != first->barrier) return false;
  }
  if (!first) return false;
  for (Thread& thread : block.threads) {
    if (thread.waiting == BARRIER) thread.waiting = NOTHING;
  }
  block.barriers++;
  return true;
}

// Let the blocks of a cluster go on whose live threads have all arrived at its barrier and wait there.
bool release_cluster(Cluster& cluster) {
  bool any = false;
  for (const Block* block : cluster) {
    for (const Thread& thread : block->threads) {
      if (thread.waiting != ENDED && !(thread.waiting == CLUSTER && thread.has_arrived)) return false;
      any |= thread.waiting != ENDED;
    }
  }
  for (Block* block : cluster) {
    for (Thread& thread : block->threads) {
      thread.has_arrived = false;
      if (thread.waiting == CLUSTER) thread.waiting = NOTHING;
    }
    block->barriers++;
  }
  return any;
}

enum Progress { NO_PROGRESS, ONLY_TURNS, SOME_PROGRESS };

Progress run_threads(Block& block) {
  Progress progress = NO_PROGRESS;
  for (u32 number : block.order) {
    Thread& thread = block.threads[number];
    if (thread.waiting == TURN) thread.waiting = NOTHING;
    if (thread.waiting != NOTHING) continue;
    block.launch->kernel->run(thread);
    progress = std::max(progress, thread.waiting == TURN ? ONLY_TURNS : SOME_PROGRESS);
  }
  return progress;
}

Progress advance(Cluster& cluster) {
  Progress progress = NO_PROGRESS;
  for (Block* block : cluster) {
    progress = std::max(progress, run_threads(*block));
    for (u32 warp = 0; warp < block->warp_exchanges.size(); warp++) {
      if (release_warp(*block, warp)) progress = SOME_PROGRESS;
    }
    if (release_barrier(*block)) progress = SOME_PROGRESS;
  }
  return release_cluster(cluster) ? SOME_PROGRESS : progress;
}

bool has_ended(const Cluster& cluster) {
  for (const Block* block : cluster) {
    for (const Thread& thread : block->threads) {
      if (thread.waiting != ENDED) return false;
    }
  }
  return true;
}

// No thread can go on: say who waits, and what a thread beside it does.
[[noreturn]] void stuck(const Cluster& cluster) {
  for (const Block* block : cluster) {
    for (const Thread& waits : block->threads) {
      if (waits.waiting == ENDED) continue;
      for (const Thread& other : block->threads) {
        if (other.where == waits.where && other.waiting == waits.waiting && other.barrier == waits.barrier) continue;
        fault(waits, "waits for ever: thread " + std::to_string(other.number) + " " + what_it_does(other), waits.where);
      }
      fault(waits, "waits for ever", waits.where);
    }
  }
  throw Fault("no thread can go on");
}

struct Resident {
  std::vector<Block> storage;
  Cluster blocks;
  u64 turns;
  bool is_late;
};

// In ascending and descending order blocks run one by one, in other orders up to seven take turns at the places where they
// wait. A block that waits for a value of another has those that come next run beside it. In the other orders one block
// is late as well: after its first turns it goes on when all others have ended or wait, as on a device whose
// multiprocessors are not equally fast. Not of more blocks than there are tags: one of a late block's would take its own.
void run_in_order(const Launch& launch, u64 order) {
  const size_t beside = order < 2 ? 1 : 1 + order % 7;
  const u64 blocks = launch.grid.count();
  const size_t late = order < 2 || blocks > TAGS ? SIZE_MAX : std::mt19937(u32(order))() % (blocks / launch.cluster.count());
  const u64 first_turns = 1 + order % 5;
  const u32 size = u32(launch.cluster.count());
  const std::vector<u32> clusters = arranged(launch.grid.count() / size, order);
  const std::vector<u32> threads = arranged(launch.block.count(), order);
  std::list<Resident> resident;
  std::unique_ptr<Resident> spare;
  size_t started = 0;
  int idle = 0;
  auto start = [&] {
    if (spare) resident.push_back(std::move(*spare)), spare.reset();
    else resident.emplace_back(), resident.back().storage.resize(size);
    Resident& one = resident.back();
    one.blocks.clear();
    for (u32 rank = 0; rank < size; rank++) {
      Block& block = one.storage[rank];
      block.launch = &launch, block.order = threads;
      begin_block(block, u64(clusters[started]) * size + rank, rank, &one.blocks);
      one.blocks.push_back(&block);
    }
    one.turns = 0, one.is_late = started == late;
    started++;
  };
  auto is_held = [&](const Resident& one) { return one.is_late && one.turns >= first_turns; };
  while (started < clusters.size() || !resident.empty()) {
    const size_t held = std::count_if(resident.begin(), resident.end(), is_held);
    while (resident.size() - held < beside && started < clusters.size()) start();
    const bool all_wait = idle > 0 || resident.size() == held;
    Progress progress = NO_PROGRESS;
    for (auto one = resident.begin(); one != resident.end();) {
      if (is_held(*one) && !(all_wait && started == clusters.size())) {
        one++;
        continue;
      }
      one->turns++;
      const Progress its = advance(one->blocks);
      if (its == NO_PROGRESS && !has_ended(one->blocks)) stuck(one->blocks);
      progress = std::max(progress, its);
      if (has_ended(one->blocks)) {
        spare.reset(new Resident(std::move(*one)));
        one = resident.erase(one);
      } else one++;
    }
    idle = progress == SOME_PROGRESS ? 0 : idle + 1;
    if (idle > 0 && started < clusters.size()) start();
    else if (idle > IDLE_ROUNDS) throw Fault(std::string(launch.kernel->name) + ": its threads wait for a value for ever");
  }
}

}  // namespace

void fault(const Thread& thread, const std::string& what, const char* where) {
  const Dimensions& index = thread.block->index;
  throw Fault(
      std::string(where) + ": thread " + std::to_string(thread.number) + " of block " + std::to_string(index.x) +
      (index.y || index.z ? ", " + std::to_string(index.y) + ", " + std::to_string(index.z) : "") + " " + what);
}

void failed_assertion(const Thread& thread, u64 text, u64 file, u32 line) {
  const std::string path = reinterpret_cast<const char*>(file);
  const std::string where = path.substr(path.rfind('/') + 1) + ":" + std::to_string(line);
  fault(thread, std::string("fails the assertion ") + reinterpret_cast<const char*>(text), where.c_str());
}

void add_kernel(const Kernel& kernel) { kernels()[kernel.name] = kernel; }

const Kernel* kernel_named(const std::string& name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : &found->second;
}

void run(const Launch& launch) {
  const std::string name = launch.kernel->name;
  const u64 threads = launch.block.count();
  if (threads == 0 || threads > launch.kernel->most_threads) {
    throw Fault(name + ": a block has " + std::to_string(threads) + " threads, 1 to " + std::to_string(launch.kernel->most_threads) + " are allowed");
  }
  const u64 size = launch.cluster.count();
  if (size == 0 || size > 16 || launch.grid.count() == 0 || launch.grid.count() % size) {
    throw Fault(name + ": " + std::to_string(launch.grid.count()) + " blocks do not make clusters of " + std::to_string(size));
  }
  const u64 order = order_of_launches++;
  try {
    run_in_order(launch, order);
  } catch (...) {
    forget_marks_of_launch();
    throw;
  }
  forget_marks_of_launch();
}

extern "C" {

void emulation_set_order(u64 order) { order_of_launches = order; }

const char* emulation_launch(
    const char* name, u32 blocks, u32 rows, u32 threads, u32 cluster, char* const* parameters) {
  static std::string said;
  const Kernel* kernel = kernel_named(name);
  if (!kernel) return "no such kernel";
  try {
    run({kernel, {blocks, rows}, {threads}, {cluster}, parameters, 0});
  } catch (const Fault& error) {
    said = error.what();
    return said.c_str();
  }
  return nullptr;
}
}
