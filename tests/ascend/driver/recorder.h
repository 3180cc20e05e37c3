// What the operators (reroute.cpp) ask of the driver's graphs (recorder.cpp).
#include <functional>

namespace emulated_driver {

using Task = std::function<void()>;

bool records();          // whether a stream captures, or a group of tasks is being replaced
void record(Task task);  // only then

}  // namespace emulated_driver
