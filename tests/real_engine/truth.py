"""Hits that the router predicts at its pick against the tokens that a real engine took from its cache.

Starts two vLLM servers with small block pools, so that they evict, and the router in front of them; sends multi-turn chats
through the router; compares `cache_hits` of the router's pick line x block size with `cached_tokens` of the engine's answer.
Each difference is put into a class, and a class is only given where the engines' own events prove it: they are recorded
here, apart from the router, and replayed into plain sets.

    truth.py --router target/release/infera-router --model DIR/model [--requests 300] [--in-flight 1] [--json FILE]

To be run with the python of the folder that install.sh has filled. Exit status: 0 if at least 99 % agree and every
difference is explained.
"""

import argparse
import bisect
import collections
import concurrent.futures
import contextlib
import datetime
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import msgspec
import zmq

BLOCK = 32
POOL_BLOCKS = 80
CONTEXT_TOKENS = 2048
AGREE_AT_LEAST = 0.99

# Classes of requests. All but the last are explained.
EQUAL = "equal"
CHANGED = "the engine's cache changed between the pick and the engine's own look-up"
LATE = "an event that the engine had published was not in the router's view yet"
UNEXPLAINED = "UNEXPLAINED"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call(url, body=None, timeout=180):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or b"null")


def wait_for(what, condition, seconds, alive=lambda: True):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError, ValueError):
            if condition():
                return
        if not alive():
            raise SystemExit(f"{what}: the process has ended")
        time.sleep(0.1)
    raise SystemExit(f"{what}: not within {seconds} s")


class History:
    """What one engine has announced, in order: a recorder of its own beside the router, and plain sets."""

    def __init__(self, context, endpoint):
        self.batches = []  # (engine's clock, events)
        self.is_complete = True
        self._next = 0
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)

    def read(self):
        while self._socket.poll(0):
            _, sequence, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(sequence, "big")
            self.is_complete &= sequence == self._next
            self._next = sequence + 1
            stamp, events, *_ = msgspec.msgpack.decode(payload)
            self.batches.append((stamp, events))

    def depths(self, ids):
        """(time, depth in blocks) of the prompt at the start and after each batch that was published."""
        blocks = [tuple(ids[at : at + BLOCK]) for at in range(0, len(ids) - len(ids) % BLOCK, BLOCK)]
        copies = collections.Counter()  # by engine hash
        content = {}  # engine hash -> (parent's engine hash, tokens)
        steps = [(0.0, 0)]
        for stamp, events in self.batches:
            for event in events:
                kind = event["type"]
                if kind == "BlockStored":
                    parent = event.get("parent_block_hash")
                    for at, name in enumerate(event["block_hashes"]):
                        content[name] = (parent, tuple(event["token_ids"][at * BLOCK : (at + 1) * BLOCK]))
                        copies[name] += 1
                        parent = name
                elif kind == "BlockRemoved":
                    copies.subtract(event["block_hashes"])
                else:
                    copies.clear()
            held = {key: name for name, key in content.items() if copies[name] > 0}
            depth, parent = 0, None
            while depth < len(blocks) and (parent, blocks[depth]) in held:
                parent = held[parent, blocks[depth]]
                depth += 1
            steps.append((stamp, depth))
        return steps


class Engine:
    def __init__(self, arguments, directory, number, context):
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.history = History(context, f"tcp://127.0.0.1:{self.events}")
        environment = dict(
            os.environ,
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1",
            PYTHONHASHSEED="0",
        )
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
            "topic": f"kv@127.0.0.1:{self.port}@toy",
        }
        command = [str(pathlib.Path(sys.executable).with_name("vllm")), "serve", arguments.model]
        command += ["--served-model-name", "toy", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(CONTEXT_TOKENS)]
        command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL_BLOCKS)]
        command += ["--max-num-seqs", "8", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
        self.log = open(directory / f"engine{number}.log", "wb")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def stop(self):
        # The server has children of its own; its process group is theirs too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Router:
    def __init__(self, arguments, directory, engines):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.path = directory / "router.log"
        command = [arguments.router, "--host", "127.0.0.1", "--port", str(self.port), "--shards", "1"]
        command += ["--router-tokenizer-path", arguments.model, "--log-format", "json"]
        for engine in engines:
            command += ["--worker", engine.url]
        environment = dict(os.environ, RUST_LOG="info")
        self.process = subprocess.Popen(command, env=environment, stderr=open(self.path, "wb"))
        self._lines = open(self.path)
        self._part = ""

    def picks(self):
        """Pick lines that have come since the last call."""
        self._part += self._lines.read()
        *whole, self._part = self._part.split("\n")
        lines = [json.loads(line) for line in whole if line.startswith("{")]
        return [line for line in lines if line.get("message") == "pick"]

    def is_following(self, count):
        metrics = urllib.request.urlopen(self.url + "/metrics", timeout=5).read().decode()
        name = "infera_router_kv_events_connected{"
        return sum(line.endswith(" 1") for line in metrics.splitlines() if line.startswith(name)) == count

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


WORDS = "river stone lamp quiet copper meadow signal orchard velvet harbor winter ladder thunder maple silver engine".split()


def words(source, count):
    return " ".join(source.choice(WORDS) for _ in range(count))


class Chat:
    """A chat that begins with one of a few system prompts and grows turn by turn."""

    def __init__(self, source, number):
        self.source = source
        system = random.Random(number % 3)
        self.messages = [{"role": "system", "content": words(system, 150)}]
        self.turns = source.randint(6, 14)

    def next_turn(self):
        self.messages.append({"role": "user", "content": words(self.source, self.source.randint(5, 60))})
        return list(self.messages)


def run(arguments, engines, router):
    source = random.Random(arguments.seed)
    results, lock = [], threading.Lock()

    def one(chat, number):
        body = {"model": "toy", "max_tokens": source.randint(4, 40), "temperature": 0}
        if number % 4 == 3:
            body["ignore_eos"] = True
        if number % 12 == 11:
            # Ready token ids that end with a block, one of three lists: mostly a repeat of what is cached as a whole.
            first = 1000 + 500 * (number // 12 % 3)
            path, body["prompt"] = "/v1/completions", list(range(first, first + 4 * BLOCK))
        elif number % 12 == 5 and len(chat.messages) > 2:
            # The last turn once more.
            path, body["messages"] = "/v1/chat/completions", chat.messages[:-1]
        else:
            path, body["messages"] = "/v1/chat/completions", chat.next_turn()
        # The next request is not sent before this one's pick is in the log, so that lines and requests pair up; how many
        # are in the engines at once is another matter.
        with lock:
            sent = pool.submit(call, router.url + path, body)
            found = []
            deadline = time.monotonic() + 30
            while not found:
                found = router.picks()
                if time.monotonic() > deadline:
                    raise SystemExit("no pick line within 30 s")
                time.sleep(0.001)
            (pick,) = found
        answer = sent.result()
        finished = time.time()
        usage = answer["usage"]
        engine = next(engine for engine in engines if str(engine.port) in pick["picked"])
        ids = body.get("prompt")
        if ids is None:
            asked = {"model": "toy", "messages": body["messages"]}
            ids = call(engine.url + "/tokenize", asked)["tokens"]
            text = answer["choices"][0]["message"]["content"] or ""
            chat.messages = [*body["messages"], {"role": "assistant", "content": text}]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        results.append(
            {
                "number": number,
                "engine": engine,
                "ids": ids,
                "prompt_tokens": usage["prompt_tokens"],
                "predicted": pick["cache_hits"] * BLOCK,
                "request_blocks": pick["request_blocks"],
                "cached": cached,
                "picked_at": datetime.datetime.fromisoformat(pick["timestamp"].replace("Z", "+00:00")).timestamp(),
                "finished_at": finished,
            }
        )

    pool = concurrent.futures.ThreadPoolExecutor(arguments.in_flight)
    drivers = concurrent.futures.ThreadPoolExecutor(arguments.in_flight)
    chats, started, running = [], 0, {}
    opened = 0
    for number in range(arguments.requests):
        for engine in engines:
            engine.history.read()
        # A chat has one turn at a time: the next needs the answer to the last.
        while len(running) >= arguments.in_flight:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                future.result()
                running.pop(future)
        chats = [chat for chat in chats if chat.turns > 0 or chat in running.values()]
        while len(chats) < arguments.chats:
            chats.append(Chat(source, opened))
            opened += 1
        chat = source.choice([chat for chat in chats if chat not in running.values() and chat.turns > 0])
        chat.turns -= 1
        running[drivers.submit(one, chat, number)] = chat
        started += 1
    for future in running:
        future.result()
    # The last events are on their way; nothing more is published once both engines are at rest.
    settled = time.monotonic() + 2
    while time.monotonic() < settled:
        for engine in engines:
            engine.history.read()
        time.sleep(0.05)
    return sorted(results, key=lambda result: result["number"])


def recorded(result):
    """Tokens of the prompt that the engine's own events allow at each step, and the step of the pick."""
    steps = result["engine"].history.depths(result["ids"])
    at_pick = bisect.bisect_right([stamp for stamp, _ in steps], result["picked_at"]) - 1
    # The last token is always computed anew, and with it its block.
    limit = (len(result["ids"]) - 1) // BLOCK
    return steps, at_pick, lambda step: min(steps[step][1], limit) * BLOCK


def agrees_with_record(result):
    _, at_pick, tokens = recorded(result)
    return tokens(at_pick) == result["predicted"]


def is_whole(result):
    return result["cached"] // BLOCK == (len(result["ids"]) - 1) // BLOCK


def classify(result):
    if result["predicted"] == result["cached"]:
        return EQUAL
    steps, at_pick, tokens = recorded(result)
    if result["predicted"] != tokens(at_pick):
        if any(tokens(step) == result["predicted"] for step in range(max(0, at_pick - 3), at_pick)):
            return LATE
        return UNEXPLAINED
    later = [step for step in range(at_pick, len(steps)) if steps[step][0] <= result["finished_at"]]
    return CHANGED if result["cached"] in [tokens(step) for step in later] else UNEXPLAINED


def report(arguments, results, engines, router):
    classes = collections.Counter()
    for result in results:
        kind = classify(result)
        classes[kind] += 1
        if kind != EQUAL:
            steps = result["engine"].history.depths(result["ids"])
            near = [
                (round(stamp - result["picked_at"], 4), depth)
                for stamp, depth in steps
                if -0.05 < stamp - result["picked_at"] < 1
            ]
            print(
                f"request {result['number']}: predicted {result['predicted']}, cached {result['cached']}, "
                f"prompt {len(result['ids'])} tokens, depths around the pick {near[:12]}: {kind}"
            )
    wrong_length = [result["number"] for result in results if len(result["ids"]) != result["prompt_tokens"]]
    wrong_blocks = [
        result["number"]
        for result in results
        if result["request_blocks"] != len(result["ids"]) // BLOCK
    ]
    removed = [
        sum(
            len(event["block_hashes"])
            for _, events in engine.history.batches
            for event in events
            if event["type"] == "BlockRemoved"
        )
        for engine in engines
    ]
    agreement = classes[EQUAL] / len(results)
    summary = {
        "requests": len(results),
        "in_flight": arguments.in_flight,
        "agreement": agreement,
        "classes": dict(classes),
        "requests_with_hits": sum(result["cached"] > 0 for result in results),
        "cached_tokens": sum(result["cached"] for result in results),
        "predicted_tokens": sum(result["predicted"] for result in results),
        "prompt_tokens": sum(result["prompt_tokens"] for result in results),
        "record_agrees_at_the_pick": sum(map(agrees_with_record, results)),
        "whole_prompt_cached": sum(map(is_whole, results)),
        "requests_by_engine": [sum(result["engine"] is engine for result in results) for engine in engines],
        "blocks_evicted_by_engine": removed,
        "recorded_without_gap": all(engine.history.is_complete for engine in engines),
        "token_counts_that_differ": wrong_length,
        "block_counts_that_differ": wrong_blocks,
    }
    print(json.dumps(summary, indent=2))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(summary, indent=2) + "\n")
    checks = {
        "agreement": agreement >= AGREE_AT_LEAST,
        "every difference explained": classes[UNEXPLAINED] == 0,
        "both engines evicted": all(removed),
        "the record has no gap": summary["recorded_without_gap"],
        "ids agree": not wrong_length and not wrong_blocks,
    }
    for name, holds in checks.items():
        print(f"{'ok' if holds else 'FAILED'}: {name}")
    return 0 if all(checks.values()) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--chats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", default=None, help="where the logs go [default: a new temporary folder]")
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    directory = pathlib.Path(arguments.logs or tempfile.mkdtemp(prefix="real-engine-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"logs in {directory}")
    context = zmq.Context()
    with contextlib.ExitStack() as stack:
        engines = []
        for number in range(2):
            # One after the other: two that start at once on few cores take longer than that together.
            engine = Engine(arguments, directory, number, context)
            stack.callback(engine.stop)
            engines.append(engine)
            is_up = lambda: call(engine.url + "/v1/models", timeout=2) is not None
            wait_for(f"engine {number}", is_up, 600, lambda: engine.process.poll() is None)
            print(f"engine {number} listens on {engine.port}", flush=True)
        router = Router(arguments, directory, engines)
        stack.callback(router.stop)
        is_ready = lambda: call(router.url + "/ready", timeout=2) is not None and router.is_following(2)
        wait_for("router", is_ready, 120, lambda: router.process.poll() is None)
        results = run(arguments, engines, router)
        return report(arguments, results, engines, router)


if __name__ == "__main__":
    sys.exit(main())
