// Graphs of the emulated driver: what would be launched on a stream that captures is kept, and runs when the graph
// does. Tasks between the beginning and the end of a group can be replaced later, with the lengths of another step say.
#include "recorder.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace {

enum { SUCCESS = 0, BUSY = 207001, CAPTURES = 1, CAPTURES_NOT = 0 };

using Group = std::vector<emulated_driver::Task>;
using Graph = std::vector<std::unique_ptr<Group>>;  // groups stay where they are: their addresses are their handles

Graph* captured = nullptr;
void* stream_of_capture = nullptr;
Group* recorded_to = nullptr;  // what is launched goes there
Group undone;

void next_group() {
    captured->push_back(std::make_unique<Group>());
    recorded_to = captured->back().get();
}

bool captures(void* stream) { return captured && stream == stream_of_capture; }

void launch(void* stream, emulated_driver::Task task) {
    if (captures(stream)) emulated_driver::record(std::move(task));
    else task();
}

uint64_t& at(void* address) { return *static_cast<uint64_t*>(address); }

}  // namespace

namespace emulated_driver {

bool records() { return recorded_to != nullptr; }
void record(Task task) { recorded_to->push_back(std::move(task)); }
void undo(Task task) {
    if (captured) undone.push_back(std::move(task));
}

}  // namespace emulated_driver

extern "C" {

int aclmdlRICaptureBegin(void* stream, int) {
    if (captured) return BUSY;
    captured = new Graph;
    stream_of_capture = stream;
    next_group();
    return SUCCESS;
}

int aclmdlRICaptureGetInfo(void* stream, int* status, void** graph) {
    *status = captures(stream) ? CAPTURES : CAPTURES_NOT;
    *graph = captures(stream) ? captured : nullptr;
    return SUCCESS;
}

int aclmdlRICaptureEnd(void*, void** graph) {
    for (; !undone.empty(); undone.pop_back()) undone.back()();
    *graph = captured;
    captured = nullptr;
    recorded_to = nullptr;
    return SUCCESS;
}

int aclmdlRICaptureTaskGrpBegin(void*) {
    next_group();
    return SUCCESS;
}

int aclmdlRICaptureTaskGrpEnd(void*, void** group) {
    *group = recorded_to;
    next_group();
    return SUCCESS;
}

int aclmdlRICaptureTaskUpdateBegin(void*, void* group) {
    recorded_to = static_cast<Group*>(group);
    recorded_to->clear();
    return SUCCESS;
}

int aclmdlRICaptureTaskUpdateEnd(void*) {
    recorded_to = nullptr;
    return SUCCESS;
}

int aclmdlRIExecuteAsync(void* graph, void*) {
    for (auto& group : *static_cast<Graph*>(graph))
        for (auto& task : *group) task();
    return SUCCESS;
}

int aclmdlRIDestroy(void* graph) {
    delete static_cast<Graph*>(graph);
    return SUCCESS;
}

int aclmdlRICaptureThreadExchangeMode(int*) { return SUCCESS; }

// To torch_npu, events from outside of a graph are numbers in the device's memory: 1 once recorded, 0 once waited for.
int aclrtValueWrite(void* address, uint64_t value, uint32_t, void* stream) {
    launch(stream, [=] { at(address) = value; });
    return SUCCESS;
}

// A device would wait without an end for what nobody writes: here nothing else runs meanwhile.
int aclrtValueWait(void* address, uint64_t value, uint32_t, void* stream) {
    launch(stream, [=] {
        if (at(address) != value) throw std::runtime_error("the graph waits for an event that nobody has recorded");
    });
    return SUCCESS;
}

}  // extern "C"
