// Loops on several threads (team.cpp).
#pragma once

#include <cstdint>
#include <type_traits>

namespace opset {

// The number of elements below which waking a second thread costs more than it saves.
constexpr int64_t WORTH_THREADS = 1 << 15;

// Calls share(loop, begin, end) for shares of [0, number), which begin at multiples of `step`, on as many threads as
// PyTorch has in the calling thread. Returns when all shares are done.
void run_on_team(int64_t number, int64_t step, void (*share)(const void*, int64_t, int64_t), const void* loop);

// Calls f(begin, end) for shares of [0, number), which begin at multiples of `step`: on several threads if it is worth
// it, otherwise once for all.
template <class F>
inline void parallel_for(int64_t number, int64_t step, bool worth, const F& f) {
    if (!worth || number <= step) f(int64_t(0), number);
    else
        run_on_team(number, step, [](const void* loop, int64_t begin, int64_t end) {
            (*static_cast<const F*>(loop))(begin, end);
        }, &f);
}

}  // namespace opset
