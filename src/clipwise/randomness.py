"""Where random numbers come from. Nothing here touches torch's global generators, and no state outlives the step it was made for.

`fast`          a generator for each purpose and step, its whole state taken from the operating system. A torch CPU generator uses
                32 bits of a seed, few enough to try them all and to meet one twice, so the state itself is filled, not the seed. On a
                GPU a kernel of ours may draw the noise as torch would, by Philox from a seed of 63 bits (kernels/noise.py).
`secure`        the same for draws; noise from a counter-mode cipher with a fresh key, in float64, as the halved sum of four
                Gaussians (Holohan & Braghin 2021), against attacks on floating-point noise.
`reproducible`  a function of (seed, purpose, step). For tests: whoever knows the seed can subtract the noise.

Noise is drawn in float64 and then rounded: torch's float32 Gaussians end at 5.8 standard deviations on a CPU, which a model of
many parameters notices, those in float64 at 8.6.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import warnings
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

_WORDS, _FIRST_WORD = 624, 24  # the words of a Mersenne Twister, and where they begin in the state of torch's CPU generator
_SUM_OF = 4  # Gaussians that `secure` adds up
_CHUNK, _BLOCK = 2**20, 2**16


class Randomness(Protocol):
    """A source of generators (for draws) and Gaussians (for noise)."""

    @property
    def name(self) -> str: ...

    def generator(self, purpose: str, step: int, device: torch.device | str = "cpu") -> torch.Generator: ...

    def gaussians(self, count: int, purpose: str, step: int, device: torch.device) -> Tensor: ...


@runtime_checkable
class Seeded(Protocol):
    """Of which a number of 63 bits is enough: a kernel draws from it. A graph reads it from a tensor."""

    def seed(self, purpose: str, step: int) -> int | Tensor: ...


@dataclass(frozen=True)
class Fast:
    """Torch's own Gaussians, from generators seeded by the operating system."""

    name: str = "fast"

    def seed(self, purpose: str, step: int) -> int:
        """For a generator on a GPU, which uses all of it."""
        return secrets.randbits(63)

    def generator(self, purpose: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        return fresh_generator(device)

    def gaussians(self, count: int, purpose: str, step: int, device: torch.device) -> Tensor:
        """(count,) in float64"""
        return gaussians_from(fresh_generator(device), count, device)


@dataclass(frozen=True)
class Secure:
    """Noise from AES-256 in counter mode, keyed anew by the operating system for every call."""

    name: str = "secure"

    def __post_init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher  # noqa: F401
        except ImportError as error:
            raise ImportError('noise="secure" needs the package cryptography: pip install "clipwise[secure]"') from error

    def generator(self, purpose: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        return fresh_generator(device)

    def gaussians(self, count: int, purpose: str, step: int, device: torch.device) -> Tensor:
        """(count,) in float64: each is half the sum of four, which has variance one again."""
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        stream = Cipher(AES256(os.urandom(32)), CTR(os.urandom(16))).encryptor()
        found = torch.empty(count, dtype=torch.float64, device=device)
        zeros = bytes(8 * _SUM_OF * min(count + 1, _CHUNK))
        for start in range(0, count, _CHUNK):
            part = found[start : start + _CHUNK]
            bits = torch.frombuffer(bytearray(stream.update(zeros[: 8 * _SUM_OF * (len(part) + len(part) % 2)])), dtype=torch.int64)
            uniform = (bits.to(device) & (2**53 - 1)).double().mul_(2.0**-53)
            part.copy_(_box_muller(uniform).view(_SUM_OF, -1).sum(0)[: len(part)] / math.sqrt(_SUM_OF))
        return found


@dataclass(frozen=True)
class Reproducible:
    """The same draws and the same noise whenever the seed is the same."""

    number: int
    name: str = "reproducible"

    def seed(self, purpose: str, step: int) -> int:
        digest = hashlib.sha256(f"{self.number} {purpose} {step}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def generator(self, purpose: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(self.seed(purpose, step))

    def gaussians(self, count: int, purpose: str, step: int, device: torch.device) -> Tensor:
        return gaussians_from(self.generator(purpose, step, device), count, device)


def reproducible(seed: int) -> Randomness:
    """Draws and noise that can be repeated, for tests: PrivateTraining(…, noise=reproducible(0)). It voids every guarantee."""
    warnings.warn("reproducible noise can be subtracted by whoever knows the seed: this run is not private", stacklevel=2)
    return Reproducible(seed)


def named(noise: str | Randomness) -> Randomness:
    if not isinstance(noise, str):
        return noise
    if noise not in ("fast", "secure"):
        raise ValueError(f'noise must be "fast", "secure" or clipwise.reproducible(seed), got {noise!r}')
    return Fast() if noise == "fast" else Secure()


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that starts where nobody can know."""
    generator = torch.Generator(device).manual_seed(secrets.randbits(63))
    if generator.device.type == "cpu":
        state = generator.get_state()
        words = state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS].view(torch.int64)
        assert int(words[0]) == generator.initial_seed() % 2**32, "the state of torch's CPU generator is laid out otherwise"
        words.copy_(torch.frombuffer(bytearray(os.urandom(4 * _WORDS)), dtype=torch.int32).long() & 0xFFFFFFFF)
        generator.set_state(state)
    return generator


def gaussians_from(generator: torch.Generator, count: int, device: torch.device) -> Tensor:
    """(count,) in float64. On a CPU by blocks that stay in its cache, which is faster than torch.randn."""
    if device.type != "cpu":
        return torch.randn(count, generator=generator, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
    found = torch.empty(count, dtype=torch.float64)
    for part in found.split(_BLOCK):
        part.copy_(_box_muller(torch.rand(len(part) + len(part) % 2, generator=generator, dtype=torch.float64))[: len(part)])
    return found


def _box_muller(uniform: Tensor) -> Tensor:
    """Two Gaussians from every two uniforms of 53 bits in [0, 1), in place. uniform: (2n,)"""
    radius, angle = uniform.chunk(2)
    radius.neg_().log1p_().mul_(-2).sqrt_()
    angle.mul_(2 * math.pi)
    sine = torch.sin(angle).mul_(radius)
    angle.cos_().mul_(radius)
    radius.copy_(sine)
    return uniform
