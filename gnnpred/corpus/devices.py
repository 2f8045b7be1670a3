"""GPUs and CPUs of a corpus that the shipped tables lack: device files in its folder ``devices``.

Rows carry their device (:attr:`gnnpred.corpus.store.MeasurementRow.spec`), so that nothing needs to be registered and
two corpora may describe one name differently.
"""

import json
from dataclasses import asdict
from pathlib import Path

from gnnpred.hardware import DeviceSpec, load_device_file

DEVICES_FOLDER = "devices"


def load_own_devices(folder: Path) -> dict[str, DeviceSpec]:
    """Name -> device, of a dataset folder; raises GnnpredError for a device file that is none."""
    devices = [load_device_file(path) for path in sorted((folder / DEVICES_FOLDER).glob("*.toml"))]
    return {device.name: device for device in devices}


def device_text(device: DeviceSpec) -> str:
    """A device file that :func:`gnnpred.hardware.load_device_file` reads back as the same device."""
    values = {name: value for name, value in asdict(device).items() if value is not None}
    # strings and lists of JSON are those of TOML, but for one character that TOML wants escaped
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
    return "".join(lines).replace("\x7f", "\\u007f")
