// Predicts the step of a job that is larger than the machines at hand: from one rank's compute
// times, the gradient buckets and the link of a rank. No I/O and no clock; `gyre plan` supplies
// them.
//
// Every rank computes the same step; bucket i's reduction starts when its gradients are final and
// the reduction of bucket i-1 is done; its update follows after the backward pass and the update of
// bucket i-1. Reductions take nothing from the computation, which is right for GPUs with NCCL and
// optimistic for CPUs that also run TCP.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/reducer.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Payload that one rank can send, and receive at the same time; and the time of an empty
// message. Ranks that share a network card have a share of its bandwidth each.
struct Link {
    double bytes_per_second = 0.0;
    double latency_seconds = 0.0;
};

// "400Gb" and "400Gbit/s" are 400e9 bits a second, "50GB" is 50e9 bytes; k, M, G, T are powers of
// 1000, Ki, Mi, Gi, Ti of 1024. Result in bytes a second. Throws Error(usage).
double parse_bandwidth(const std::string& text);
// "5us", "0.2ms", "800ns", "1s", in seconds. Throws Error(usage).
double parse_latency(const std::string& text);

// fastest: of ring and tree, for each bucket.
enum class AllreduceAlgorithm { ring, tree, fastest };

// Seconds to sum `bytes` over n ranks in place, alpha = latency, B = bandwidth, S = bytes.
//
// Ring: 2 (n-1) alpha + 2 (n-1)/n S/B; reduce-scatter, then all-gather, n-1 steps each of S/n
// bytes. Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
// J. Parallel Distrib. Comput. 69 (2009) 117-124.
double ring_seconds(int ranks, double bytes, const Link& link);
// Double binary tree: 2 ceil(log2 n) alpha + 2 S/B; half of the data goes up and down each of two
// trees, in which no rank is an inner node twice. Sanders, Speck and Traff, Two-tree algorithms for
// full bandwidth broadcast, reduction and scan, Parallel Computing 35 (2009) 581-594; the same
// terms are in NCCL's own model (src/graph/tuning.cc: bandwidth x 0.5, latency 2 log2(nodes)). The
// filling of the pipeline, which grows with the square root of S, is left out as it is there.
double tree_seconds(int ranks, double bytes, const Link& link);
double allreduce_seconds(AllreduceAlgorithm algorithm, int ranks, double bytes, const Link& link);

// One rank's step without communication, in seconds. ready[i]: from the begin of the backward pass
// until the gradients of the i-th layer with parameters are final; so it falls with i.
struct ComputeTimes {
    double forward = 0.0, backward = 0.0, update = 0.0;
    std::vector<double> ready;
    double total() const { return forward + backward + update; }
};

// ready[] where only the whole backward pass is known: it is divided by operations. flop[i]: one
// direction of the i-th layer with parameters; its backward pass first takes as many for the
// weights, then, except in the first, as many again for the input.
std::vector<double> ready_by_flop(const std::vector<double>& flop, double backward_seconds);

struct PlannedBucket {
    std::int64_t bytes = 0;
    double ready = 0.0, start = 0.0, end = 0.0;  // seconds since the step began
};

struct StepPlan {
    int ranks = 1;
    std::vector<PlannedBucket> buckets;
    double compute = 0.0;        // the step of one rank
    double communication = 0.0;  // all reductions
    double exposed = 0.0;        // of that, while the rank waits
    double step() const { return compute + exposed; }
    double efficiency() const { return compute / step(); }
    // The part of the communication that computation hides; 1 if there is none.
    double overlap() const { return communication > 0.0 ? 1.0 - exposed / communication : 1.0; }
};

// layer_begins: of the layers with parameters, ascending, as in Net; a bucket is final with the
// layer that its first element belongs to.
StepPlan plan_step(int ranks, const ComputeTimes& compute, const std::vector<Bucket>& buckets,
                   const std::vector<std::int64_t>& layer_begins, AllreduceAlgorithm algorithm,
                   const Link& link);

}  // namespace gyre::train
