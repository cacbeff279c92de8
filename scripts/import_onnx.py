#!/usr/bin/env python3
"""Turns an ONNX model into a model file and weights that gyre trains, evaluates and predicts with.

    scripts/import_onnx.py NET.onnx -o DIR [--mean M,M,M --std S,S,S] [--resize HxW|N,centercropM]

It writes DIR/net.model (the layers, as in docs/own-net.md) and DIR/net.safetensors (the weights, with the model file,
the images' shape and their normalisation within), and takes what torch.onnx.export() writes of nets whose layers gyre
has: convolutions in groups, batch normalisation, activations, pooling, sums, squeeze-and-excitation, concatenation,
linear layers. What it cannot take it lists. Export a net that is to be trained further with
`training=torch.onnx.TrainingMode.PRESERVE`; otherwise the exporter folds batch normalisations into convolutions. It needs
the Python package onnx (Debian, Ubuntu: python3-onnx).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import struct
import sys

KINDS = {"conv": "conv", "batchnorm": "bn", "groupnorm": "gn", "linear": "fc"}  # what gyre calls layers with parameters


class Refused(Exception):
    """What cannot be taken, for the user."""


@dataclasses.dataclass
class Layer:
    """A line of the model file, which reads the values `first` and perhaps `second`, and makes the value `out`."""

    line: str
    first: int
    second: int | None
    out: int
    tensors: dict


@dataclasses.dataclass
class Part:
    """A part of GELU's formula: factor, times x, times erf(x / sqrt(2)) or that plus 1, as the flags say."""

    x: int
    factor: float = 1.0
    times_x: bool = False
    erf: bool = False  # erf(x / sqrt(2)) itself
    one_more: bool = False  # that plus 1


class Importer:
    def __init__(self, model) -> None:
        import onnx
        from onnx import numpy_helper

        self.to_array = numpy_helper.to_array
        self.graph = onnx.shape_inference.infer_shapes(model).graph
        if any(opset.domain in ("", "ai.onnx") and opset.version < 11 for opset in model.opset_import):
            raise Refused("the model's opset is older than 11; export it again with opset_version=17")
        self.constants = {tensor.name: self.to_array(tensor) for tensor in self.graph.initializer}
        self.shapes = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in [*self.graph.value_info, *self.graph.input, *self.graph.output]
        }
        inputs = [value.name for value in self.graph.input if value.name not in self.constants]
        if len(inputs) != 1 or len(self.graph.output) != 1:
            raise Refused(f"the model has {len(inputs)} inputs and {len(self.graph.output)} outputs, not one of each")
        self.image = self.shapes[inputs[0]][1:]
        if len(self.image) != 3 or min(self.image) < 1:
            raise Refused(f"the input '{inputs[0]}' is no batch of images [N, channels, height, width] of a fixed size")
        self.readers = {}
        for node in self.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.values = {inputs[0]: 0}  # names to numbers of values; 0 is the input
        self.parts = {}  # names to parts of formulas
        self.gates = {}  # names of sigmoids and the like to what they are of
        self.channels = {0: self.image[0]}
        self.grouped = {}  # names of values with channels in groups to (value, groups, whether groups take turns)
        self.fixed = set()  # names of constants within the net, which no optimiser has changed
        self.scalable = {}  # names of normalised values to their layers, of which weight or bias may follow
        self.joined = {}  # tuples of values to the value that they are put together
        self.layers = []

    # --- values -------------------------------------------------------------------------------------------------------

    def attributes(self, node) -> dict:
        import onnx

        return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}

    def constant(self, name: str):
        if name not in self.constants:
            raise Refused(f"'{name}' is not a constant")
        return self.constants[name]

    def scalar(self, name: str) -> float | None:
        value = self.constants.get(name)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def number(self, name: str) -> int:
        if name in self.parts:
            raise Refused("its input is a part of a formula that is no activation of gyre's")
        if name in self.constants:
            raise Refused(f"its input '{name}' is a constant")
        return self.values[name]

    def spatial(self, name: str) -> list[int]:
        return self.shapes.get(name, [])[2:]

    def add(self, node, line: str, first: int, second: int | None = None, channels=None, name="", **tensors) -> None:
        out = len(self.layers) + 1
        self.layers.append(Layer(line, first, second, out, tensors))
        self.values[name or node.output[0]] = out
        self.channels[out] = self.channels[first] if channels is None else channels

    def same(self, node) -> None:
        """The output is the input under another name."""
        name = node.input[0]
        for known in (self.values, self.constants, self.parts):
            if name in known:
                known[node.output[0]] = known[name]

    def only_reader(self, name: str, kind: str):
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None

    # --- windows ------------------------------------------------------------------------------------------------------

    def window(self, node, options: dict) -> tuple[int, int, int]:
        """Kernel, stride and padding, each the same in both directions."""
        kernel = options.get("kernel_shape") or list(self.constant(node.input[1]).shape[2:])
        strides, pads = options.get("strides", [1, 1]), options.get("pads", [0, 0, 0, 0])
        if options.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
            raise Refused("auto_pad is not supported; export with explicit padding")
        for what, numbers in (("window", kernel), ("stride", strides), ("padding", pads)):
            if len(set(numbers)) != 1:
                raise Refused(f"its {what} {numbers} is not the same on all sides")
        if set(options.get("dilations", [1])) != {1}:
            raise Refused(f"its dilation {options['dilations']} is not 1")
        return kernel[0], strides[0], pads[0]

    def rounds_up(self, node, options: dict, kernel: int, stride: int, padding: int) -> bool:
        """Whether ceil_mode makes a difference."""
        spans = [side + 2 * padding - kernel for side in self.spatial(node.input[0])] or [1]
        return bool(options.get("ceil_mode", 0)) and any(span % stride for span in spans)

    @staticmethod
    def words(kernel: int, stride: int, padding: int, default_stride: int = 1) -> str:
        return (f" s{stride}" if stride != default_stride else "") + (f" p{padding}" if padding else "")

    # --- operators ----------------------------------------------------------------------------------------------------

    def conv(self, node) -> None:
        options = self.attributes(node)
        kernel, stride, padding = self.window(node, options)
        weight, groups = self.constant(node.input[1]), options.get("group", 1)
        bias = self.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        line = f"conv {weight.shape[0]} k{kernel}" + self.words(kernel, stride, padding)
        line += (f" g{groups}" if groups > 1 else "") + (" nobias" if bias is None else "")
        tensors = {"weight": weight} | ({} if bias is None else {"bias": bias})
        self.add(node, line, self.number(node.input[0]), channels=weight.shape[0], **tensors)

    def batch_normalization(self, node) -> None:
        options = self.attributes(node)
        names = ("weight", "bias", "running_mean", "running_var")
        tensors = {name: self.constant(given) for name, given in zip(names, node.input[1:], strict=True)}
        epsilon, momentum = round(options.get("epsilon", 1e-5), 9), round(1 - options.get("momentum", 0.9), 6)
        line = "batchnorm" + (f" eps {epsilon:g}" if epsilon != 1e-5 else "")
        line += f" momentum {momentum:g}" if momentum != 0.1 else ""
        if {*node.input[1:3]} <= self.fixed and (tensors["weight"] == 1).all() and not tensors["bias"].any():
            line += " noaffine"
        self.add(node, line, self.number(node.input[0]), **tensors)

    def groupnorm(self, node, value: int, groups: int, weight, bias) -> None:
        epsilon = round(self.attributes(node).get("epsilon", 1e-5), 9)
        line = f"groupnorm {groups}" + (f" eps {epsilon:g}" if epsilon != 1e-5 else "")
        self.add(node, line, value, weight=weight, bias=bias)

    def instance_normalization(self, node) -> None:
        import numpy

        scale, shift = self.constant(node.input[1]), self.constant(node.input[2])
        if node.input[0] not in self.grouped:
            value = self.number(node.input[0])
            return self.groupnorm(node, value, self.channels[value], scale, shift)
        value, groups, _ = self.grouped[node.input[0]]
        if (scale != 1).any() or shift.any():
            raise Refused("its groups have weights, instead of the channels")
        count = self.channels[value]
        self.groupnorm(node, value, groups, numpy.ones(count, numpy.float32), numpy.zeros(count, numpy.float32))
        self.scalable[node.output[0]] = self.layers[-1]
        self.layers[-1].line += " noaffine"  # unless a weight or a bias follows
        return None

    def layer_normalization(self, node) -> None:
        value, axis = self.number(node.input[0]), self.attributes(node).get("axis", -1)
        weight = self.constant(node.input[1])
        if axis not in (-1, 1) or weight.shape != (self.channels[value],):
            raise Refused("it does not normalise a flat value")
        import numpy

        bias = self.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else numpy.zeros_like(weight)
        self.groupnorm(node, value, 1, weight, bias)

    def scales(self, node, what: str) -> bool:
        """Whether a group normalisation's weight or bias, as `what` says, is a factor or a term of its own here."""
        for name, other in (node.input, reversed(node.input)):
            layer, values = self.scalable.get(name), self.constants.get(other)
            if layer is None or values is None or len(self.readers[name]) > 1:
                continue
            if values.size not in (1, self.channels[layer.out]):
                continue
            if layer.tensors["bias"].any() or (what == "weight" and (layer.tensors["weight"] != 1).any()):
                continue
            layer.tensors[what] = values.reshape(-1).repeat(self.channels[layer.out] // values.size)
            if other not in self.fixed or (values != (what == "weight")).any():
                layer.line = layer.line.removesuffix(" noaffine")
            self.values[node.output[0]] = layer.out
            self.scalable[node.output[0]] = layer
            return True
        return False

    def gemm(self, node) -> None:
        options = self.attributes(node)
        if options.get("alpha", 1.0) != 1.0 or options.get("beta", 1.0) != 1.0 or options.get("transA", 0):
            raise Refused("alpha, beta or transA is not the default")
        weight = self.constant(node.input[1])
        bias = self.constant(node.input[2]) if len(node.input) > 2 else None
        self.linear(node, weight if options.get("transB", 0) else weight.T, bias)

    def matmul(self, node) -> None:
        following = self.only_reader(node.output[0], "Add")
        bias = None
        for name in following.input if following is not None else []:
            bias = self.constants.get(name, bias)
        self.linear(node, self.constant(node.input[1]).T, bias)
        if bias is not None:
            self.values[following.output[0]] = self.values[node.output[0]]
            following.op_type = "Done"

    def linear(self, node, weight, bias) -> None:
        import numpy

        bias = numpy.zeros(weight.shape[0], numpy.float32) if bias is None else bias.reshape(-1)
        outputs = weight.shape[0]
        self.add(node, f"linear {outputs}", self.number(node.input[0]), channels=outputs, weight=weight, bias=bias)

    def activation(self, node, line: str) -> None:
        self.add(node, line, self.number(node.input[0]))

    def clip(self, node) -> None:
        options = self.attributes(node)
        least, most = (
            self.scalar(node.input[i]) if len(node.input) > i and node.input[i] else options.get(name)
            for i, name in ((1, "min"), (2, "max"))
        )
        if (least, most) == (0.0, 6.0):
            self.activation(node, "relu6")
        elif least == 0.0 and most is None:
            self.activation(node, "relu")
        else:
            raise Refused(f"it clips to {least} and {most}; gyre has relu6, 0 to 6")

    def gate(self, node, line: str, whole: str) -> None:
        """A sigmoid, or, times its own input, the activation `whole`."""
        product = self.only_reader(node.output[0], "Mul")
        if product is not None and node.input[0] in product.input:
            self.gates[node.output[0]] = (node.input[0], whole)
        else:
            self.activation(node, line)

    def hard_sigmoid(self, node) -> None:
        options = self.attributes(node)
        if abs(options.get("alpha", 0.2) - 1 / 6) > 1e-6 or options.get("beta", 0.5) != 0.5:
            raise Refused("its slope is not 1/6, as torch.nn.Hardsigmoid has it")
        self.gate(node, "hardsigmoid", "hardswish")

    def erf(self, node) -> None:
        part = self.parts.get(node.input[0])
        if part is None or part.erf or not part.times_x or abs(part.factor - math.sqrt(0.5)) > 1e-6:
            raise Refused("erf is known within GELU only")
        self.parts[node.output[0]] = Part(part.x, erf=True)

    def scaled(self, node, name: str, factor: float) -> None:
        part = self.parts.get(name) or Part(self.number(name), times_x=True)
        self.formula(node, dataclasses.replace(part, factor=part.factor * factor))

    def formula(self, node, part: Part) -> None:
        if part.times_x and part.one_more and abs(part.factor - 0.5) < 1e-6:
            self.add(node, "gelu", part.x)
        else:
            self.parts[node.output[0]] = part

    def div(self, node) -> None:
        divisor = self.scalar(node.input[1])
        if divisor is None:
            raise Refused("it divides by what is no constant")
        self.scaled(node, node.input[0], 1 / divisor)

    def mul(self, node) -> None:
        if self.scales(node, "weight"):
            return None
        a, b = node.input
        for name, other in ((a, b), (b, a)):
            factor = self.scalar(name)
            if factor is not None:
                return self.scaled(node, other, factor)
        for name, other in ((a, b), (b, a)):
            if name in self.gates and self.gates[name][0] == other:
                return self.add(node, self.gates[name][1], self.number(other))
            part, rest = self.parts.get(name), self.parts.get(other)
            if part is not None and part.one_more and not part.times_x:
                x = rest or Part(self.number(other), times_x=True)
                if x.x == part.x and x.times_x and not x.erf and not x.one_more:
                    return self.formula(node, dataclasses.replace(part, factor=part.factor * x.factor, times_x=True))
        for gate, other in ((a, b), (b, a)):
            if self.spatial(gate) == [1, 1] and self.channels[self.number(gate)] == self.channels[self.number(other)]:
                return self.add(node, "mul", self.number(gate), self.number(other))
        raise Refused("it multiplies two values of which neither has one number for each channel")

    def add_values(self, node) -> None:
        if self.scales(node, "bias"):
            return None
        a, b = node.input
        for name, other in ((a, b), (b, a)):
            part = self.parts.get(name)
            if part is not None and part.erf and self.scalar(other) == 1.0:
                self.parts[node.output[0]] = Part(part.x, one_more=True)
                return None
        first, second = sorted((self.number(a), self.number(b)), reverse=True)  # the latest is at hand
        return self.add(node, "add", first, second)

    def concat(self, node) -> None:
        if self.attributes(node).get("axis") not in (1, -3):
            raise Refused("it does not join channels")
        values = tuple(self.number(name) for name in node.input)
        # DenseNets join the same values again and again, each time with one more.
        known = max((n for n in range(1, len(values) + 1) if values[:n] in self.joined), default=1)
        before = self.joined.get(values[:known], values[0])
        for n in range(known, len(values)):
            channels = self.channels[before] + self.channels[values[n]]
            self.add(node, "concat", values[n], before, channels=channels)
            before = self.joined[values[: n + 1]] = self.values[node.output[0]]
        self.values[node.output[0]] = before

    def maxpool(self, node) -> None:
        options = self.attributes(node)
        window = self.window(node, options)
        line = f"maxpool {window[0]}" + self.words(*window, default_stride=window[0])
        self.activation(node, line + (" ceil" if self.rounds_up(node, options, *window) else ""))

    def average_pool(self, node) -> None:
        options = self.attributes(node)
        if options["kernel_shape"] == self.spatial(node.input[0]) and not any(options.get("pads", [])):
            return self.activation(node, "avgpool global")
        kernel, stride, padding = self.window(node, options)
        if padding or self.rounds_up(node, options, kernel, stride, padding):
            raise Refused("average pooling has no padding in gyre, and no ceil_mode that makes a difference")
        if (kernel, stride) == (1, 1):
            return self.same(node)
        return self.activation(node, f"avgpool {kernel}" + self.words(kernel, stride, 0, default_stride=kernel))

    def reduce_mean(self, node) -> None:
        axes = self.attributes(node).get("axes")
        axes = self.constant(node.input[1]).tolist() if axes is None and len(node.input) > 1 else axes
        if axes is None or sorted(axis % 4 for axis in axes) != [2, 3] or len(self.shapes.get(node.input[0], [])) != 4:
            raise Refused("it is no mean over whole planes")
        self.activation(node, "avgpool global")

    def reshape(self, node) -> None:
        if node.input[0] in self.scalable:  # back to the shape before the groups
            self.scalable[node.output[0]] = self.scalable[node.input[0]]
            return self.same(node)
        target = [int(extent) for extent in self.constant(node.input[1])]
        if node.input[0] in self.grouped:
            value, groups, turns = self.grouped[node.input[0]]
            if not turns or len(target) != 4 or target[1] not in (-1, self.channels[value]):
                raise Refused("it divides channels into groups for something else than a shuffle")
            return self.add(node, f"shuffle {groups}", value)
        if len(target) == 5 and target[1] * target[2] == self.channels[self.number(node.input[0])]:
            sides = self.spatial(node.input[0]) or [0, 0]  # 0: not known
            if all(known in (0, side) for known, side in zip(sides, target[3:], strict=True)):
                self.grouped[node.output[0]] = (self.number(node.input[0]), target[1], False)
                return None
        value = self.values.get(node.input[0])
        if len(target) == 3 and value is not None and target[0] == 0 and self.channels[value] % target[1] == 0:
            self.grouped[node.output[0]] = (value, target[1], False)
            return None
        if len(target) != 2 or target[1] not in (-1, math.prod(self.shapes.get(node.input[0], [0])[1:])):
            raise Refused(f"it reshapes to {target}, which does not flatten")
        return self.same(node)

    def transpose(self, node) -> None:
        if node.input[0] not in self.grouped or self.attributes(node).get("perm") != [0, 2, 1, 3, 4]:
            raise Refused("it is no part of a channel shuffle")
        value, groups, _ = self.grouped[node.input[0]]
        self.grouped[node.output[0]] = (value, groups, True)

    def chunk(self, node, name: str, first: int, count: int) -> None:
        """Channels first .. first + count - 1 of the input, as a part of equal ones."""
        value = self.number(node.input[0])
        channels = self.channels[value]
        for parts in range(1, channels + 1):
            size = -(-channels // parts)
            if first % size == 0 and count == min(size, channels - first):
                return self.add(node, f"chunk {first // size + 1}/{parts}", value, channels=count, name=name)
        raise Refused(f"channels {first} to {first + count - 1} of {channels} are no part as torch.chunk makes them")

    def split(self, node) -> None:
        options = self.attributes(node)
        if options.get("axis", 0) not in (1, -3):
            raise Refused("it does not divide channels")
        sizes = options.get("split")
        if len(node.input) > 1 and node.input[1]:
            sizes = self.constant(node.input[1]).tolist()
        if sizes is None:
            sizes = [self.channels[self.number(node.input[0])] // len(node.output)] * len(node.output)
        first = 0
        for name, size in zip(node.output, sizes, strict=True):
            if self.readers.get(name):
                self.chunk(node, name, first, size)
            first += size

    def slice(self, node) -> None:
        starts, ends, axes, steps = (
            self.constant(node.input[i]).tolist() if len(node.input) > i and node.input[i] else default
            for i, default in ((1, None), (2, None), (3, [0]), (4, [1]))
        )
        if len(starts) != 1 or axes[0] not in (1, -3) or steps != [1]:
            raise Refused("it takes no neighbouring channels")
        channels = self.channels[self.number(node.input[0])]
        first, end = (min(at + channels if at < 0 else at, channels) for at in (starts[0], ends[0]))
        self.chunk(node, node.output[0], first, end - first)

    def flatten(self, node) -> None:
        if self.attributes(node).get("axis", 1) != 1:
            raise Refused("it does not flatten from the channels on")
        self.same(node)

    def dropout(self, node) -> None:
        ratio = self.attributes(node).get("ratio", self.scalar(node.input[1]) if len(node.input) > 1 else 0.5)
        self.activation(node, f"dropout {ratio:g}")

    def folded(self, node) -> bool:
        """Whether the node's outputs follow from constants, such as sizes that the exporter has left as a computation."""
        if node.op_type == "Shape":
            import numpy

            shape = self.shapes.get(node.input[0], [])
            if shape and min(shape) > 0 and not node.attribute:
                self.constants[node.output[0]] = numpy.array(shape)
            return node.output[0] in self.constants
        if node.op_type in ("Constant", "Identity") or not all(name in self.constants for name in node.input if name):
            return False
        try:
            from onnx.reference import ReferenceEvaluator

            results = ReferenceEvaluator(node).run(None, {name: self.constants[name] for name in node.input if name})
        except (ImportError, NotImplementedError, TypeError, ValueError):
            return False
        self.constants |= dict(zip(node.output, results, strict=True))
        if all(name in self.fixed for name in node.input if name):
            self.fixed.update(node.output)
        return True

    def take(self, node) -> None:
        if self.folded(node):
            return
        handlers = {
            "Conv": self.conv,
            "BatchNormalization": self.batch_normalization,
            "InstanceNormalization": self.instance_normalization,
            "LayerNormalization": self.layer_normalization,
            "Gemm": self.gemm,
            "MatMul": self.matmul,
            "Relu": lambda n: self.activation(n, "relu"),
            "LeakyRelu": lambda n: self.activation(n, f"leaky_relu {self.attributes(n).get('alpha', 0.01):.7g}"),
            "Gelu": lambda n: self.activation(n, "gelu"),
            "HardSwish": lambda n: self.activation(n, "hardswish"),
            "Clip": self.clip,
            "Sigmoid": lambda n: self.gate(n, "sigmoid", "silu"),
            "HardSigmoid": self.hard_sigmoid,
            "Erf": self.erf,
            "Div": self.div,
            "Mul": self.mul,
            "Add": self.add_values,
            "Concat": self.concat,
            "MaxPool": self.maxpool,
            "AveragePool": self.average_pool,
            "GlobalAveragePool": lambda n: self.activation(n, "avgpool global"),
            "ReduceMean": self.reduce_mean,
            "Reshape": self.reshape,
            "Transpose": self.transpose,
            "Split": self.split,
            "Slice": self.slice,
            "Flatten": self.flatten,
            "Squeeze": self.same,
            "Identity": self.same,
            "Cast": self.same,
            "Softmax": self.same,
            "LogSoftmax": self.same,
            "Dropout": self.dropout,
            "Done": lambda n: None,
            "Shape": lambda n: None,  # a node that reads it is refused, unless its value does not matter
        }
        if node.op_type == "Constant":
            (value,) = self.attributes(node).values()
            import numpy

            self.fixed.add(node.output[0])
            tensor = hasattr(value, "raw_data")
            self.constants[node.output[0]] = self.to_array(value) if tensor else numpy.array(value)
        elif node.op_type not in handlers:
            raise Refused("gyre has no such layer")
        elif node.op_type in ("Softmax", "LogSoftmax") and self.readers.get(node.output[0]):
            raise Refused("it is supported as the last operator only")
        else:
            handlers[node.op_type](node)

    # --- results ------------------------------------------------------------------------------------------------------

    def run(self) -> tuple[str, int, dict]:
        """The text of the model file, the number of classes and the tensors by name."""
        refused, missing = [], set()
        for node in self.graph.node:
            if missing.intersection(node.input):
                missing.update(node.output)  # what follows from what is refused is not the fault
                continue
            try:
                self.take(node)
            except Refused as reason:
                refused.append(f"{node.op_type} '{node.name or node.output[0]}': {reason}")
                missing.update(node.output)
        if refused:
            raise Refused("\n  ".join([f"{len(refused)} operators cannot be taken:", *refused]))
        result = self.number(self.graph.output[0].name)
        if result != len(self.layers):
            raise Refused("the output is not what the last operator computes")
        self.name_classes()
        return self.text(), int(self.channels[result]), self.tensors()

    def name_classes(self) -> None:
        """The last layer that learns gives the classes, if what follows it keeps the channels."""
        at = max((i for i, layer in enumerate(self.layers) if layer.tensors), default=-1)
        if at >= 0 and all(layer.second is None for layer in self.layers[at + 1 :]):
            kind, _, *rest = self.layers[at].line.split()
            if kind in ("linear", "conv"):
                self.layers[at].line = " ".join([kind, "classes", *rest])

    def text(self) -> str:
        """The lines, with names for values that are not read by the next line alone."""
        at_hand = {layer.first for layer in self.layers if layer.first != layer.out - 1}
        named = at_hand | {layer.second for layer in self.layers if layer.second is not None}
        names = {value: f"v{i}" for i, value in enumerate(sorted(named), 1)}
        lines = [f"as {names[0]}"] if 0 in names else []
        for layer in self.layers:
            if layer.first != layer.out - 1:
                lines.append(f"from {names[layer.first]}")
            lines.append(layer.line + (f" {names[layer.second]}" if layer.second is not None else ""))
            if layer.out in names:
                lines.append(f"as {names[layer.out]}")
        return "\n".join(lines) + "\n"

    def tensors(self) -> dict:
        counts, tensors = dict.fromkeys(KINDS, 0), {}
        for layer in self.layers:
            word = layer.line.split()[0]
            if word in KINDS:
                counts[word] += 1
                left_out = ("weight", "bias") if layer.line.endswith(" noaffine") else ()
                tensors |= {f"{KINDS[word]}{counts[word]}.{name}": value for name, value in layer.tensors.items()
                            if name not in left_out}  # fmt: skip
        return tensors


def save_safetensors(path: pathlib.Path, tensors: dict, metadata: dict[str, str]) -> None:
    header, at, data = {"__metadata__": metadata}, 0, []
    for name, tensor in tensors.items():
        raw = tensor.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def numbers(text: str, count: int, what: str) -> str:
    given = [float(word) for word in text.split(",")]
    if len(given) not in (1, count):
        raise Refused(f"--{what} has {len(given)} numbers, but the images have {count} channels")
    return ",".join(repr(value) for value in (given * count)[:count])


def resize(text: str, image: tuple[int, int, int]) -> str:
    form = re.fullmatch(r"(?:\d+,centercrop)?(\d+)x(\d+)|\d+,centercrop(\d+)", text)
    if form is None:
        raise Refused(f"--resize {text} must be rows and columns, such as 64x64, or the shorter side and the middle of "
                      "the image, such as 256,centercrop224")  # fmt: skip
    height, width, both = (extent and int(extent) for extent in form.groups())
    if (height or both, width or both) != tuple(image[1:]):
        raise Refused(f"--resize {text} is not the size of the net's images, {image[1]}x{image[2]}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("net", type=pathlib.Path, help="the ONNX model")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, help="the folder to write to")
    parser.add_argument("--mean", help="what is subtracted from pixels of 0 to 1, by channel [as in the file, or 0]")
    parser.add_argument("--std", help="what they are divided by then [as in the file, or 1]")
    parser.add_argument("--resize", help="how pictures are brought to the net's size, as in gyre train [as in the file]")
    options = parser.parse_args()
    try:
        import onnx
    except ImportError:
        print(f"{sys.executable} has no package onnx; install it (Debian, Ubuntu: apt-get install python3-onnx; or pip "
              "install onnx), or name another Python in PYTHON", file=sys.stderr)  # fmt: skip
        return 1
    try:
        model = onnx.load(options.net)
        importer = Importer(model)
        text, classes, tensors = importer.run()
        facts = {entry.key: entry.value for entry in model.metadata_props}
        pictures = {}
        for what, usual in (("mean", "0"), ("std", "1")):
            given = getattr(options, what) or facts.get(f"gyre.{what}")
            if given is None:
                print(f"the file does not say how pixels are normalised: --{what} {usual} is assumed", file=sys.stderr)
            pictures[f"gyre.{what}"] = numbers(given or usual, importer.image[0], what)
        if given := options.resize or facts.get("gyre.resize"):
            pictures["gyre.resize"] = resize(given, importer.image)
    except (Refused, OSError, ValueError) as reason:
        print(f"{options.net}: {reason}", file=sys.stderr)
        return 1
    except Exception as reason:  # onnx and protobuf have exceptions of their own for malformed files
        print(f"{options.net}: {type(reason).__name__}: {reason}", file=sys.stderr)
        return 1
    shape = "x".join(str(extent) for extent in importer.image)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "net.model").write_text(f"# {options.net.name}, for images of {shape}\n{text}")
    metadata = {"gyre.model": text, "gyre.shape": shape, "gyre.classes": str(classes), **pictures}
    save_safetensors(options.output / "net.safetensors", tensors, metadata)
    count = sum(tensor.size for name, tensor in tensors.items() if "running_" not in name)
    print(f"{options.output / 'net.model'}: {len(importer.layers)} layers; {options.output / 'net.safetensors'}: "
          f"{count} parameters; images of {shape}, {classes} classes")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
