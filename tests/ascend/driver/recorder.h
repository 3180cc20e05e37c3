// What the operators (reroute.cpp) ask of the driver's graphs (recorder.cpp).
#include <functional>

namespace emulated_driver {

using Task = std::function<void()>;

bool records();          // whether a stream captures, or a group of tasks is being replaced
void record(Task task);  // only then
void undo(Task task);    // what takes back, at the end of a capture, something that was done during it

}  // namespace emulated_driver
