"""Devices and clusters: what the machine under a job can do."""

from gnnpred.hardware.device import (
    DEFAULT_DEVICE_NAME,
    DeviceSpec,
    device_of_fields,
    find_device,
    list_devices,
    load_device_file,
)

__all__ = ["DEFAULT_DEVICE_NAME", "DeviceSpec", "device_of_fields", "find_device", "list_devices", "load_device_file"]
