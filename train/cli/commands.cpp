#include "train/cli/commands.hpp"

namespace gyre::train {

std::vector<Command> commands(Options& o) {
    return {
        {.name = "train",
         .about = "Train a net",
         .examples = "Examples:\n"
                     "  gyre train --data mnist --epochs 3 --save run\n"
                     "  mpirun -np 4 gyre train --model wide --optimizer adam --metrics log.jsonl",
         .flags = train_flags(o.train),
         .launch = &o.train.launch,
         .collective = true,
         .run = [&o](Communicator& comm) { return run_train(comm, o.train); }},
        {.name = "verify",
         .about = "Train again what was trained, and compare to the last bit",
         .examples = "Examples:\n"
                     "  gyre verify run\n"
                     "  mpirun -np 2 gyre verify run --from run/step-000000235.safetensors",
         .flags = verify_flags(o.verify),
         .launch = &o.verify.launch,
         .collective = true,
         .run = [&o](Communicator& comm) { return run_verify(comm, o.verify); }},
        {.name = "replay",
         .about = "Repeat one step of a training, and show its images and norms",
         .examples = "Example:\n"
                     "  gyre replay run --step 205",
         .flags = replay_flags(o.replay),
         .launch = &o.replay.launch,
         .collective = true,
         .run = [&o](Communicator& comm) { return run_replay(comm, o.replay); }},
        {.name = "eval",
         .about = "Loss and accuracy of saved weights",
         .examples = "Examples:\n"
                     "  gyre eval --data mnist --weights best.safetensors\n"
                     "  mpirun -np 4 gyre eval --data mnist --weights best.safetensors",
         .flags = eval_flags(o.eval),
         .launch = &o.eval.launch,
         .collective = true,
         .run = [&o](Communicator& comm) { return run_eval(comm, o.eval); }},
        {.name = "plan",
         .about = "Predict a step on many ranks",
         .examples = "Example:\n"
                     "  gyre plan --ranks 8,64 --bandwidth 400Gb --latency 5us",
         .flags = plan_flags(o.plan),
         .collective = true,
         .run = [&o](Communicator& comm) { return run_plan(comm, o.plan); }},
        {.name = "info",
         .about = "What this build and this machine have, or a net, or weights",
         .examples = "",
         .flags = info_flags(o.info),
         .run = [&o](Communicator&) { return run_info(o.info); }},
        {.name = "predict",
         .about = "What saved weights take images for",
         .examples = "Example:\n"
                     "  gyre predict --weights run/best.safetensors cat.jpg dog.png",
         .flags = predict_flags(o.predict),
         .run = [&o](Communicator& comm) { return run_predict(comm, o.predict); }},
        {.name = "export",
         .about = "Write saved weights, with their net, as ONNX",
         .examples = "Example:\n"
                     "  gyre export --weights run/best.safetensors --onnx net.onnx",
         .flags = export_flags(o.exported),
         .run = [&o](Communicator&) { return run_export(o.exported); }},
        {.name = "import",
         .about = "Turn an ONNX model into a model file and weights",
         .examples = "Example:\n"
                     "  gyre import resnet18.onnx -o resnet18",
         .flags = import_flags(o.imported),
         .run = [&o](Communicator&) { return run_import(o.imported); }},
        {.name = "diff",
         .about = "Compare two files of weights to the last bit",
         .examples = "Example:\n"
                     "  gyre diff one/last.safetensors two/last.safetensors",
         .flags = diff_flags(o.diff),
         .run = [&o](Communicator&) { return run_diff(o.diff); }},
        {.name = "plot",
         .about = "Draw loss and accuracy of trainings",
         .examples = "Example:\n"
                     "  gyre plot a.jsonl b.csv -o loss.svg",
         .flags = plot_flags(o.plot),
         .run = [&o](Communicator&) { return run_plot(o.plot); }},
        {.name = "launch",
         .about = "Start ranks on this host, as torchrun does",
         .examples =
             "Examples, as `torchrun --standalone --nproc-per-node 4 train.py ...`, and on\n"
             "each of two hosts, the first one, with the same GYRE_SECRET:\n"
             "  gyre launch -n 4 -- train --data mnist\n"
             "  gyre launch -n 4 --nnodes 2 --node-rank 0 --master-addr node1 -- train",
         .flags = launch_flags(o.launch),
         .run = nullptr},
    };
}

}  // namespace gyre::train
