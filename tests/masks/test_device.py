"""The CPU as a mask device, and which device a name stands for."""

import pytest
import torch

from gd_plugin.masks.device import CpuDevice, open_device
from gd_plugin.testing import SimulatedDevice

HAS_CUDA = torch.cuda.is_available()


def test_everything_happens_at_once_on_the_cpu():
    device = CpuDevice()
    source, target = device.empty_host(4), device.empty(4)
    for tensor in (source, target):
        assert tensor.dtype == torch.int32 and tensor.tolist() == [0] * 4 and not tensor.is_pinned()
    event = device.event()
    source += 3
    device.copy(target, source, device.side)
    source += 1
    device.record(event, device.side)
    device.wait(event, device.main())
    assert target.tolist() == [3] * 4
    device.launch(lambda: target.mul_(2), device.main(), writes=[target])
    device.synchronize(event)
    assert target.tolist() == [6] * 4
    assert not device.is_capturing()


@pytest.mark.parametrize("name", ["cpu", torch.device("cpu")])
@pytest.mark.parametrize("pin_memory", [None, True, False])
def test_the_cpu_by_name(name, pin_memory):
    assert isinstance(open_device(name, pin_memory), CpuDevice)


@pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device, which None stands for")
def test_none_is_the_cpu_without_a_gpu():
    assert isinstance(open_device(None, None), CpuDevice)


def test_a_device_of_ones_own_is_kept():
    device = SimulatedDevice()
    assert open_device(device, None) is device


@pytest.mark.parametrize("name", ["meta", "mps", torch.device("xpu", 1)])
def test_other_devices_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"on the CPU or on CUDA, got device '{torch.device(name)}'"):
        open_device(name, None)
