"""GPUs and CPUs of a corpus that the shipped tables lack: device files in its folder ``devices``.

Rows carry their device (:attr:`gnnpred.corpus.store.MeasurementRow.spec`), so that nothing needs to be registered and
two corpora may describe one name differently.
"""

from pathlib import Path

from gnnpred.hardware import DeviceSpec, load_device_file

DEVICES_FOLDER = "devices"


def load_own_devices(folder: Path) -> dict[str, DeviceSpec]:
    """Name -> device, of a dataset folder; raises GnnpredError for a device file that is none."""
    devices = [load_device_file(path) for path in sorted((folder / DEVICES_FOLDER).glob("*.toml"))]
    return {device.name: device for device in devices}
