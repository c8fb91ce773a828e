"""Peer of `lockstep bench recipes`: a ResNet in PyTorch's modules, under torchvision's names."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

import peer_loop


def convolution(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """With three convolutions it narrows, convolves and widens; with two it convolves."""

    def __init__(self, inputs, width, outputs, stride):
        super().__init__()
        sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if outputs != width:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.parts = len(sizes)
        for number, size in enumerate(sizes, 1):
            setattr(self, f"conv{number}", convolution(*size))
            setattr(self, f"bn{number}", nn.BatchNorm2d(size[1]))
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride),
                                            nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = x
        for number in range(1, self.parts + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            if number < self.parts:
                y = F.relu(y, inplace=True)
        shortcut = self.downsample(x) if hasattr(self, "downsample") else x
        return F.relu(y + shortcut, inplace=True)


class ResNet(nn.Module):
    def __init__(self, blocks, expansion, classes):
        super().__init__()
        self.classes = classes
        self.conv1, self.bn1 = convolution(3, 64, 7, 2), nn.BatchNorm2d(64)
        inputs, width = 64, 64
        for stage, count in enumerate(blocks, 1):
            layers = []
            for i in range(count):
                stride = 2 if stage > 1 and i == 0 else 1
                layers.append(Block(inputs, width, width * expansion, stride))
                inputs = width * expansion
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
            width *= 2
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images, classes):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images)), inplace=True), 3, 2, 1)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return F.cross_entropy(self.fc(x.mean((2, 3))), classes)


def build(settings, dtype, device):
    weights = peer_loop.read_safetensors(os.path.join(settings["start"], "model"))
    classes = weights["fc.bias"].numel()
    blocks = [1 + max(int(name.split(".")[1]) for name in weights if name.startswith(layer))
              for layer in ("layer1", "layer2", "layer3", "layer4")]
    expansion = weights["fc.weight"].shape[1] // 512
    net = ResNet(blocks, expansion, classes)
    net.load_state_dict(weights)
    net.to(device)
    return net.to(memory_format=torch.channels_last) if device.type == "cuda" else net


if __name__ == "__main__":
    peer_loop.main(build)
