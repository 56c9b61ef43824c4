// The threads that compute, and how they wait for each other.
//
// A decode step has hundreds of points where threads meet, some microseconds apart. There they spin, since to sleep and
// be woken takes longer than the work. What takes longer than SPIN, as the pause between two requests, is slept through.
//
// Linux readily wakes a thread on the core of the one that wakes it, and then sees two busy threads there that it has no
// reason to part, while another core is idle: each waits for the other, and a step takes ten times as long. So whoever
// has waited for YIELD lets others run once, and a thread that finds itself on the core of a colleague keeps off it.
//
// OpenMP's threads are told how to wait by environment variables only, torch's loops and these alike, and stop spinning
// altogether once several threads of the process have used OpenMP.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagoda {

constexpr std::chrono::microseconds SPIN(2000);  // longer than what lies between two steps
constexpr std::chrono::microseconds YIELD(50);

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

class Team {
public:
    explicit Team(int size) : size_(size), cpu_of_(size) {
        sched_getaffinity(0, sizeof allowed_, &allowed_);
        for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { serve(index); });
    }

    ~Team() {
        is_ending_ = true;
        announce();
        for (std::thread& thread : threads_) thread.join();
    }

    // Calls body(*this) on every thread of the team, this one included; returns when all have returned.
    template <class Body>
    void run(Body& body) {
        context_ = &body;
        cpu_of_[0] = sched_getcpu();
        job_ = [](void* context, Team& team) { (*static_cast<Body*>(context))(team); };
        announce();
        job_(context_, *this);
        barrier();
    }

    // The functions below are called by all threads of the team, in the same order.

    // All threads have come here before any goes on.
    void barrier() {
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) {
            wait(phase_, phase);
            return;
        }
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        advance(phase_);
    }

    // body(0), body(1), ... body(count - 1), each thread a contiguous share; all done at the end.
    template <class Body>
    void share(int64_t count, Body body) {
        const int64_t end = count * (index() + 1) / size_;
        for (int64_t i = count * index() / size_; i < end; ++i) body(i);
        barrier();
    }

    // The same, each thread taking the next one when it is done with one: for things of unequal size.
    template <class Body>
    void take(int64_t count, Body body) {
        for (int64_t i = next_.fetch_add(1); i < count; i = next_.fetch_add(1)) body(i);
        barrier();
    }

private:
    static int& index() {
        thread_local int index = 0;
        return index;
    }

    void serve(int own_index) {
        index() = own_index;
        for (uint32_t seen = 0;; ++seen) {
            wait(announced_, seen);
            if (is_ending_) return;
            keep_apart(own_index);
            job_(context_, *this);
            barrier();
        }
    }

    // Leave this core, and stay away from it, if a member of lower index is on it.
    void keep_apart(int own_index) {
        const int cpu = sched_getcpu();
        cpu_of_[own_index] = cpu;
        for (int other = 0; other < own_index; ++other) {
            if (cpu_of_[other] != cpu) continue;
            cpu_set_t mask = allowed_;
            for (int member = 0; member < size_; ++member)
                if (member != own_index) CPU_CLR(cpu_of_[member], &mask);
            if (CPU_COUNT(&mask)) sched_setaffinity(0, sizeof mask, &mask);
            cpu_of_[own_index] = sched_getcpu();
            return;
        }
    }

    void announce() { advance(announced_); }

    void advance(std::atomic<uint32_t>& value) {
        value.fetch_add(1);
        if (num_asleep_.load()) value.notify_all();
    }

    // Returns when `value` is no longer `old`.
    void wait(const std::atomic<uint32_t>& value, uint32_t old) {
        const auto begin = std::chrono::steady_clock::now();
        for (auto now = begin, yielded = begin; now < begin + SPIN; now = std::chrono::steady_clock::now()) {
            for (int i = 0; i < 64; ++i) {
                if (value.load(std::memory_order_acquire) != old) return;
                pause();
            }
            if (now > yielded + YIELD) {
                sched_yield();
                yielded = now;
            }
        }
        num_asleep_.fetch_add(1);
        value.wait(old);
        num_asleep_.fetch_sub(1);
    }

    const int size_;
    void (*job_)(void*, Team&) = nullptr;
    void* context_ = nullptr;
    bool is_ending_ = false;
    cpu_set_t allowed_;
    std::vector<std::atomic<int>> cpu_of_;  // of each member, when it last began a job
    alignas(64) std::atomic<uint32_t> announced_{0};  // jobs so far
    std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};  // barriers so far
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::vector<std::thread> threads_;
};

// The team of this process, and whose turn it is to use it. Not in a template: there must be one only.
struct Turn {
    std::mutex mutex;
    std::unique_ptr<Team> team;
    int size = 0;

    static Turn& the_one() {
        static Turn turn;
        static const int registered = pthread_atfork(
            [] { the_one().mutex.lock(); }, [] { the_one().mutex.unlock(); },
            [] {
                (void)turn.team.release();  // its threads are not in the child
                turn.size = 0;
                turn.mutex.unlock();
            });
        (void)registered;
        return turn;
    }
};

// body(team) on `size` threads, which stay for the next call. Calls from several threads take turns.
template <class Body>
void on_team(int size, Body body) {
    Turn& turn = Turn::the_one();
    const std::lock_guard<std::mutex> lock(turn.mutex);
    if (turn.size != size) {
        turn.team.reset();
        turn.team = std::make_unique<Team>(size);
        turn.size = size;
    }
    turn.team->run(body);
}

}  // namespace pagoda
