// A team of threads for the loops of all kernels. They take shares of a loop by turns, so that a thread that another
// process interrupts keeps no more than one share waiting. OpenMP would give each thread its part in advance.
#include "_team.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <system_error>
#include <thread>

namespace opset {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// Threads wait actively for so long. A layer's next loop mostly begins within this time. Longer waits would use up the
// time that the system's scheduler gives them, and then it interrupts them in a share.
constexpr auto ACTIVE_WAIT = 100us;
// Another process needs a core if the last share keeps the others waiting for so long beyond the longest share, or if
// the thread that runs the loop waits for its core for this part of the time, seen over so long.
constexpr auto LATE = 1ms, WATCH = 10ms;
constexpr double WAITING = 0.1;
// The core is then left to it: at first for so long, and for up to so long if it needs a core again soon after.
constexpr auto FIRST_PAUSE = 10ms, LAST_PAUSE = 640ms, SOON = 100ms;
constexpr int64_t SHARES_OF_A_THREAD = 4;

// Waits until done() for at most ACTIVE_WAIT. Returns whether it is done. It yields the core, because the thread for
// which it waits may need it.
template <class F>
bool waited_actively(F done) {
    for (const auto end = Clock::now() + ACTIVE_WAIT; !done(); std::this_thread::yield())
        if (Clock::now() > end) return false;
    return true;
}

// The time for which this thread could have run, but its core ran another; zero where the system does not tell.
Clock::duration waited_for_core() {
    long long ran = 0, waited = 0;
    if (std::FILE* file = std::fopen("/proc/thread-self/schedstat", "r")) {
        if (std::fscanf(file, "%lld %lld", &ran, &waited) != 2) waited = 0;
        std::fclose(file);
    }
    return std::chrono::nanoseconds(waited);
}

// How many threads help the calling one: one fewer for some time after another process needed a core.
class Helpers {
    int wanted = 0, number = 0;
    Clock::time_point tried, next_try, watched;
    Clock::duration pause = FIRST_PAUSE, waited{};

    void watch(Clock::time_point now) { watched = now, waited = waited_for_core(); }

  public:
    int at(Clock::time_point now, int most) {
        if (most != wanted) wanted = number = most;
        else if (number < wanted && now >= next_try) {
            number++;
            tried = now;
            watch(now);
        }
        return number;
    }

    // late: whether the last share kept the others waiting.
    void after_loop(Clock::time_point now, bool late) {
        const auto time = now - watched;
        if (time < WATCH && !late) return;
        const auto before = waited;
        watch(now);
        // A loop may be the first for a long time.
        const bool waiting = time < 10 * WATCH && waited - before > WAITING * time;
        if (!late && !waiting) return;
        pause = now - tried < SOON ? std::min<Clock::duration>(2 * pause, LAST_PAUSE) : FIRST_PAUSE;
        number = std::max(0, number - 1);
        next_try = now + pause;
    }
};

class Team {
    std::atomic_flag taken;  // by a thread whose loop runs
    Helpers helpers;
    int started = 0, allowed = INT_MAX;  // helpers, and the most that the system has allowed

    // The loop. It may change while it is not open and no helper is inside.
    void (*share)(const void*, int64_t, int64_t);
    const void* loop;
    int64_t number, length;
    int helping;
    std::atomic<int64_t> next{0};
    std::atomic<bool> open{false};
    std::atomic<int> posted{0}, inside{0};

    // Does shares until none is left. Returns the time of the longest.
    Clock::duration do_shares() {
        Clock::duration longest{};
        for (auto before = Clock::now();;) {
            const int64_t begin = next.fetch_add(length);
            if (begin >= number) return longest;
            share(loop, begin, std::min(begin + length, number));
            const auto now = Clock::now();
            longest = std::max(longest, now - before);
            before = now;
        }
    }

    void help(int index, int seen) {
        for (;;) {
            if (!waited_actively([&] { return posted.load() != seen; })) posted.wait(seen);
            seen = posted.load();
            // Entering before looking whether the loop is open: whoever closes it sees all that are inside.
            inside.fetch_add(1);
            if (open.load() && index < helping) do_shares();
            if (inside.fetch_sub(1) == 1) inside.notify_all();
        }
    }

    // Waits until no helper is inside.
    void leave() {
        if (waited_actively([&] { return inside.load() == 0; })) return;
        for (int left; (left = inside.load()) != 0;) inside.wait(left);
    }

    // Starts the helpers up to this number. Returns how many of them there are, because the system may allow no more.
    int start(int most) {
        try {
            for (; started < std::min(most, allowed); started++)
                std::thread(&Team::help, this, started, posted.load()).detach();
        } catch (const std::system_error&) {
            allowed = started;
        }
        return std::min(started, most);
    }

  public:
    // Whether the loop has run. It has not if another thread's loop runs, or if no thread helps.
    bool run(int64_t of, int64_t step, int threads, void (*with)(const void*, int64_t, int64_t), const void* data) {
        if (threads < 2 || taken.test_and_set(std::memory_order_acquire)) return false;
        helping = start(helpers.at(Clock::now(), threads - 1));
        if (helping > 0) {
            const int64_t steps = (of + step - 1) / step, shares = std::min(steps, SHARES_OF_A_THREAD * threads);
            share = with, loop = data, number = of, length = (steps + shares - 1) / shares * step;
            next.store(0);
            open.store(true);
            posted.fetch_add(1);
            posted.notify_all();
            const auto longest = do_shares();
            open.store(false);
            const auto before = Clock::now();
            leave();
            const auto now = Clock::now();
            helpers.after_loop(now, now - before > longest + LATE);
        }
        const bool has_run = helping > 0;
        taken.clear(std::memory_order_release);
        return has_run;
    }
};

// It is never destroyed, because its threads run until the process ends.
Team*& team() {
    static Team* one = [] {
        // A forked process has none of the threads, so it needs a team of its own.
        pthread_atfork(nullptr, nullptr, [] { team() = new Team; });
        return new Team;
    }();
    return one;
}

}  // namespace

void run_on_team(int64_t number, int64_t step, void (*share)(const void*, int64_t, int64_t), const void* loop) {
    if (!team()->run(number, step, omp_get_max_threads(), share, loop)) share(loop, 0, number);
}

}  // namespace opset
