// Runs operators on tensors of device "npu" as PyTorch's CPU kernels, over the same memory: see README.md.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "recorder.h"

namespace {

using c10::DispatchKey;
using c10::IValue;

// What only says where memory is, or moves it between devices, is torch_npu's own to do.
const std::set<std::string> kept = {
    "aten::set_",       "aten::resize_",        "aten::record_stream",     "aten::is_pinned",     "aten::_pin_memory",
    "aten::_to_copy",   "aten::empty",          "aten::empty_like",        "aten::empty_strided", "aten::new_empty",
    "aten::is_set_to",  "aten::new_empty_strided"};
// Operators that may meet tensors of the CPU, by PyTorch's own rules, and one of ATB's that has its lengths there.
const std::set<std::string> mixed = {"aten::copy_",          "aten::_copy_from",  "aten::_copy_from_and_resize",
                                     "aten::index",          "aten::index_put_",  "aten::_index_put_impl_",
                                     "aten::_unsafe_index",  "atb::_npu_paged_attention"};
// What has its result on the host, and so must wait for the NPU.
const std::set<std::string> read = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"};

struct Pair {
    at::Tensor npu, host;
};

// The operands of one call, and the same memory as tensors of the CPU.
struct Operands {
    std::vector<Pair> pairs;
    bool may_mix;

    at::Tensor host(const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (!tensor.is_privateuseone()) {
            TORCH_CHECK(may_mix || tensor.dim() == 0, "expected all tensors on the emulated NPU, found one on ",
                        tensor.device());
            return tensor;
        }
        auto options = tensor.options().device(at::kCPU);
        auto alias = tensor.numel() == 0 ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                                         : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
        pairs.push_back({tensor, alias});
        return alias;
    }

    // An operand itself where it was written to, or a new tensor with the values.
    at::Tensor npu(const at::Tensor& result) {
        if (!result.defined()) return result;
        for (auto& pair : pairs) {
            if (!pair.host.is_same(result)) continue;
            if (pair.npu.sizes() != result.sizes()) {  // an empty `out=`
                pair.npu.resize_(result.sizes());
                host_view(pair.npu).copy_(result);
            }
            return pair.npu;
        }
        auto device = c10::Device(c10::DeviceType::PrivateUse1, 0);
        auto tensor = at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
        if (result.numel() != 0) host_view(tensor).copy_(result);
        return tensor;
    }

    static at::Tensor host_view(const at::Tensor& tensor) {
        return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    }
};

template <typename Function>
IValue map_tensors(const IValue& value, const Function& function) {
    if (value.isTensor()) return function(value.toTensor());
    if (value.isTensorList()) {
        std::vector<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
        return tensors;
    }
    if (value.isList() && value.toListRef().size() && (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone())) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const IValue& element : value.toListRef())
            tensors.push_back(element.isNone() ? std::optional<at::Tensor>() : function(element.toTensor()));
        return tensors;
    }
    TORCH_CHECK(!value.isGenerator() || value.toGenerator().device().is_cpu(), "generators of an NPU are not emulated");
    if (value.isDevice() && value.toDevice().is_privateuseone()) return c10::Device(at::kCPU);
    return value;
}

// One call on the CPU's side, to be done again when a graph is replayed.
struct Call {
    c10::OperatorHandle op;
    std::vector<IValue> arguments;

    std::vector<IValue> run() const {
        torch::jit::Stack stack = arguments;
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        op.callBoxed(&stack);
        return stack;
    }
};

void prepare_capture(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
    TORCH_CHECK(!read.count(schema.name()), schema.name(), " reads from the NPU, which cannot be captured");
    for (size_t i = 0; i < arguments.size(); ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (!alias || !alias->isWrite() || !arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
        TORCH_CHECK(arguments[i].toTensor().is_privateuseone(), schema.name(),
                    " writes to the host, which cannot be captured");
        auto written = Operands::host_view(arguments[i].toTensor());
        emulated_driver::undo([written, before = written.clone()] { written.copy_(before); });
    }
}

// Whatever is captured is done at once as well, for the shapes of its results, and taken back at the end.
void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    Operands operands{{}, mixed.count(schema.name()) > 0};
    auto arguments = torch::jit::pop(*stack, schema.arguments().size());
    if (emulated_driver::records()) prepare_capture(schema, arguments);
    Call call{op, {}};
    auto to_host = [&](const at::Tensor& tensor) { return operands.host(tensor); };
    for (const IValue& argument : arguments) call.arguments.push_back(map_tensors(argument, to_host));
    std::vector<at::Tensor> written;  // the memory of each result, as the CPU's
    for (const IValue& result : call.run())
        stack->push_back(map_tensors(result, [&](const at::Tensor& tensor) {
            auto npu = operands.npu(tensor);
            written.push_back(npu.defined() && npu.numel() ? Operands::host_view(npu) : at::Tensor());
            return npu;
        }));
    if (!emulated_driver::records()) return;
    emulated_driver::record([call, written] {
        size_t i = 0;
        for (const IValue& result : call.run())
            map_tensors(result, [&](const at::Tensor& tensor) {
                const auto& memory = written[i++];
                if (memory.defined() && memory.data_ptr() != tensor.data_ptr()) memory.copy_(tensor);
                return tensor;
            });
    });
}

bool makes_views(const c10::FunctionSchema& schema) {
    for (const auto& result : schema.returns())
        if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
}

std::vector<torch::Library> libraries;  // for as long as the process lives

void reroute(const c10::OperatorName& name) {
    const auto separator = name.name.find("::");
    libraries.emplace_back(torch::Library::IMPL, name.name.substr(0, separator), DispatchKey::PrivateUse1, __FILE__,
                           __LINE__);
    auto local = name.name.substr(separator + 2) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    libraries.back().impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

// Every operator of PyTorch that torch_npu has a kernel for, and the named ones of torch_npu, separated by blanks.
// Returns how many.
extern "C" int reroute_operators(const char* named) {
    auto& dispatcher = c10::Dispatcher::singleton();
    int count = 0;
    for (const auto& name : dispatcher.getAllOpNames()) {
        auto op = dispatcher.findOp(name);
        if (name.name.rfind("aten::", 0) != 0 || kept.count(name.name) || !op->hasSchema()) continue;
        if (!op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
        if (makes_views(op->schema())) continue;
        reroute(name);
        ++count;
    }
    std::istringstream names(named);
    for (std::string name; names >> name; ++count) {
        const auto dot = name.find('.');
        reroute({name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    }
    return count;
}
