#!/usr/bin/env bash
# aiperf and guidellm (PyPI, pinned, in environments of their own below target/) next to loadgen: the same prompts, in
# turns, through one router in front of simulated engines. Says what each measured, and fails where one of the two differs
# from loadgen by more than 5 % in median TTFT or throughput. Not part of the tests: it installs a gigabyte.
#
# Throughput is that of a closed loop. TTFT is that of a steady rate: in a closed loop an engine takes up a request that
# follows an answer at its next step, and the time until then depends on how fast the client itself is. Its median, because
# guidellm begins a steady rate with a burst of a second's requests.
#
#   loadgen/compare_tools.sh [ROUNDS]        default: 3
#   INFERA_BIN=DIR                           where infera-router and loadgen are [default: a release build of this tree]
#
# Exit status: 0 they agree, 1 they do not, 2 something could not be run.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:-3}
readonly tools=target/compare_tools aiperf_version=0.13.0
# The last one without torch, which it would need for nothing here but its size.
readonly guidellm_version=0.3.1
readonly requests=160 concurrency=8 rate=8 answer_tokens=16 prompt_words=250

die() { echo "compare_tools: $1" >&2; exit 2; }

install() { # tool version
  [ "$(cat "$tools/$1/installed.txt" 2>/dev/null)" = "$2" ] && return
  echo "installing $1 $2 ..."
  rm -rf "${tools:?}/$1"
  python3 -m venv "$tools/$1" || die "python3 -m venv failed (Debian package: python3-venv)"
  "$tools/$1/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: "$1==$2" || die "$1 $2 cannot be installed"
  printf %s "$2" >"$tools/$1/installed.txt"
}

mkdir -p "$tools"
install aiperf "$aiperf_version"
install guidellm "$guidellm_version"
if [ -z "${INFERA_BIN:-}" ]; then
  cargo build --release -p infera-router -p loadgen
  INFERA_BIN=${CARGO_TARGET_DIR:-target}/release
fi

scratch=$(mktemp -d)
pids=()
stop() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$scratch"
}
trap stop EXIT

wait_for() { # what, command...
  local what=$1 deadline=$((SECONDS + 60))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || { tail -n 20 "$scratch"/*.log >&2; die "no $what within a minute"; }
    sleep 0.1
  done
}

# Engines without a prefix cache and without jitter: what is compared is the measuring. Their steps are long beside the
# milliseconds that a client in Python takes on a busy machine.
"$INFERA_BIN/loadgen" fleet '2 mixed prefix_cache=false jitter=0 step_base_ms=40 prefill_us_per_token=150' \
  --workers-file "$scratch/workers.json" >"$scratch/fleet.log" 2>&1 &
pids+=($!)
wait_for "fleet" test -s "$scratch/workers.json"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$INFERA_BIN/infera-router" --host 127.0.0.1 --port "$port" --shards 1 --router-policy round-robin \
  --workers-file "$scratch/workers.json" >"$scratch/router.log" 2>&1 &
pids+=($!)
url=http://127.0.0.1:$port
wait_for "router" curl -fsS "$url/ready"
model=$(curl -fsS "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

# The same prompts for all three, and the tokenizer of the engines for those who count tokens themselves.
mkdir "$scratch/tokenizer"
cp loadgen/assets/tokenizer.json loadgen/assets/tokenizer_config.json loadgen/assets/chat_template.jinja "$scratch/tokenizer/"
python3 - "$scratch" "$model" $requests $answer_tokens $prompt_words $rate <<'PYTHON'
import json, pathlib, random, sys
scratch, model, requests, answer_tokens, prompt_words, rate = pathlib.Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
words = pathlib.Path("loadgen/assets/words.txt").read_text().split()
draw = random.Random(1)
prompts = [" ".join(draw.choices(words, k=prompt_words)) for _ in range(requests)]
body = lambda text: {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": answer_tokens,
                     "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
def write(name, lines):
    (scratch / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
write("loadgen.jsonl", ({"time": number / rate, "body": body(text)} for number, text in enumerate(prompts)))
write("aiperf.jsonl", ({"text": text, "output_length": answer_tokens} for text in prompts))
write("guidellm.jsonl", ({"prompt": text, "output_tokens_count": answer_tokens} for text in prompts))
PYTHON

# Each takes a directory for its files, and whether the load is a closed loop or a steady rate.
run_loadgen() {
  local pace=()
  [ "$2" = steady ] || pace=(--concurrency $concurrency)
  "$INFERA_BIN/loadgen" run --target "$url" --recording "$scratch/loadgen.jsonl" --requests $requests "${pace[@]}" \
    --json "$1/report.json"
}
run_aiperf() {
  local pace=(--concurrency $concurrency)
  [ "$2" = closed ] || pace=(--request-rate $rate --arrival-pattern constant)
  "$tools/aiperf/bin/aiperf" profile --model "$model" --url "$url" --endpoint-type chat --streaming \
    --input-file "$scratch/aiperf.jsonl" --custom-dataset-type single_turn --request-count $requests "${pace[@]}" \
    --extra-inputs ignore_eos:true --extra-inputs max_tokens:$answer_tokens \
    --tokenizer "$scratch/tokenizer" --use-server-token-count \
    --artifact-dir "$1" --ui-type none --no-gpu-telemetry --no-server-metrics
}
run_guidellm() {
  local pace=(--rate-type concurrent --rate $concurrency)
  [ "$2" = closed ] || pace=(--rate-type constant --rate $rate)
  HF_HUB_OFFLINE=1 GUIDELLM__PREFERRED_ROUTE=chat_completions "$tools/guidellm/bin/guidellm" benchmark run \
    --target "$url" --model "$model" --processor "$scratch/tokenizer" --data "$scratch/guidellm.jsonl" \
    --data-args '{"prompt_column": "prompt", "output_tokens_count_column": "output_tokens_count"}' \
    "${pace[@]}" --max-requests $requests --output-path "$1/report.json" --disable-progress
}

for round in $(seq "$rounds"); do
  for tool in loadgen aiperf guidellm; do
    for pace in closed steady; do
      echo "round $round: $tool, $pace"
      mkdir -p "$scratch/$tool/$round/$pace"
      "run_$tool" "$scratch/$tool/$round/$pace" $pace >"$scratch/$tool-$round-$pace.log" 2>&1 ||
        { tail -n 30 "$scratch/$tool-$round-$pace.log" >&2; die "$tool failed"; }
    done
  done
done

python3 - "$scratch" "$rounds" <<'PYTHON'
import json, pathlib, statistics, sys
scratch, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def of_loadgen(directory):
    report = json.loads((directory / "report.json").read_text())
    return report["ttft_ms"]["p50"], report["throughput_rps"], report["requests"] - report["errors"]

def of_aiperf(directory):
    report = json.loads(next(directory.rglob("profile_export_aiperf.json")).read_text())
    return report["time_to_first_token"]["p50"], report["request_throughput"]["avg"], report["request_count"]["avg"]

def of_guidellm(directory):
    benchmark = json.loads((directory / "report.json").read_text())["benchmarks"][0]
    answers = benchmark["requests"]["successful"]
    seconds = max(it["end_time"] for it in answers) - min(it["start_time"] for it in answers)
    return statistics.median(it["time_to_first_token_ms"] for it in answers), len(answers) / seconds, len(answers)

readers = {"loadgen": of_loadgen, "aiperf": of_aiperf, "guidellm": of_guidellm}

def of_round(tool, number):
    closed, steady = (readers[tool](scratch / tool / str(number) / pace) for pace in ("closed", "steady"))
    return steady[0], closed[1], closed[2] + steady[2]

found = {tool: [of_round(tool, number) for number in range(1, rounds + 1)] for tool in readers}
agree = True
print(f"{'tool':<10}{'answers':>9}{'TTFT p50 ms':>14}{'ratio':>8}{'requests/s':>12}{'ratio':>8}   medians of {rounds} rounds; ratios within a round")
for tool, runs in found.items():
    ratios = [statistics.median(own[part] / base[part] for own, base in zip(runs, found["loadgen"])) for part in (0, 1)]
    values = [statistics.median(run[part] for run in runs) for part in range(3)]
    print(f"{tool:<10}{values[2]:>9.0f}{values[0]:>14.2f}{ratios[0]:>8.3f}{values[1]:>12.2f}{ratios[1]:>8.3f}")
    agree &= all(abs(ratio - 1) <= 0.05 for ratio in ratios)
print("they agree within 5 %" if agree else "THEY DIFFER by more than 5 %")
sys.exit(0 if agree else 1)
PYTHON
