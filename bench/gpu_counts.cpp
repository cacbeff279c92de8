#include "bench/gpu_counts.hpp"

#include <fmt/format.h>

#include <memory>

#include "base/error.hpp"
#include "bench/gpu_operations.hpp"

namespace gyre::bench {
namespace {

using emulated::Operation;

Operation find(const std::string& net, const std::string& layer, const std::string& direction) {
    for (const Net& each : nets()) {
        for (const Layer& one : each.layers) {
            if (each.name == net && one.name == layer) {
                emulated::Operations operations(net, layer);
                std::visit(operations, one.work);
                for (Operation& operation : operations.take()) {
                    if (operation.direction == direction) {
                        return std::move(operation);
                    }
                }
            }
        }
    }
    throw Error(ExitCode::internal,
                fmt::format("counts_of(): no operation {}/{}/{}", net, layer, direction));
}

}  // namespace

std::vector<simt::LaunchProfile> counts_of(const std::string& net, const std::string& layer,
                                           const std::string& direction, int n, bool tf32,
                                           int multiprocessors) {
    simt::enable_profiler();
    const Operation operation = find(net, layer, direction);
    emulated::Stream stream;
    emulated::Workspace workspace(stream);
    const emulated::Context context{stream, workspace, multiprocessors, tf32};
    const auto factory = emulated::make_own_factory(context);
    const std::unique_ptr<Op> op = emulated::make(*factory, operation, n, true);
    std::vector<std::unique_ptr<void, void (*)(void*)>> memory;
    emulated::Args args{.n = n, .timed = true, .at = {}};
    for (const emulated::Operand& operand : operation.operands) {
        memory.emplace_back(emulated::allocate(operand.bytes(n)), emulated::release);
        if (operand.type == emulated::Type::i32) {  // an index; other values do not matter
            stream.fill_zero(memory.back().get(), operand.bytes(n));
        }
        args.at.push_back(memory.back().get());
    }
    const emulated::Gpu gpu{context, op.get()};
    simt::emulator::set_most_blocks(kCountedBlocks);
    if (operation.set_up) {
        operation.set_up(gpu, args);
    }
    stream.synchronize();
    simt::take_profiles();
    operation.ours(gpu, args);
    stream.synchronize();
    simt::emulator::set_most_blocks(-1);
    return simt::take_profiles();
}

}  // namespace gyre::bench
