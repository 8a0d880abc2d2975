#!/usr/bin/env python3
"""Reference for random chat requests: what vLLM's rules and transformers make of each.

    prompt_reference.py TOKENIZER_DIR COUNT SEED

Writes one JSON line per request: {"id", "body", "text", "ids"} or {"id", "body", "error"}. `body` is the request as
text, so that its own bytes reach both sides. Needs `transformers` and `jinja2`; `tests/prompt_differential.rs` reads it.
"""
import copy
import json
import logging
import os
import random
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
logging.disable(logging.WARNING)

from transformers import PreTrainedTokenizerFast  # noqa: E402

WORDS = "the of and code Token cache über naïve прыжок 東京 你好 안녕 مرحبا नमस्ते สวัสดี café cafe\u0301 ﬁ Å A\u030a İ ſ".split()
ODDITIES = [
    "", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\r", "\u00a0", "\u200b", "\u2028", "\u0085", "\x0b", "\x1c", "\x1f", "\x00",
    "\x7f", "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "1234567890", "3.14", "0x1F", "'s", "'LL", "<b>&amp;</b>", "{{ x }}", "{% if %}", "\\n", "\"", "'",
    "<think>", "</think>", "<tool_response>", "</tool_response>", "<tool_call>", "aaaaaaaaaaaaaaaa", "====", "ab" * 20, "\U0001f9d1",
    "x-anthropic-billing-header: a", "CONTINUE", "[INST]", "<s>", "None", "True",
]


class Source:
    """Random values that look like requests."""

    def __init__(self, seed, specials):
        self.r = random.Random(seed)
        self.specials = specials

    def text(self, longest=12):
        r = self.r
        out = []
        for _ in range(r.choice([0, 1, 1, 2, 3, 5, longest])):
            kind = r.random()
            if kind < 0.55:
                out.append(r.choice(WORDS) + r.choice(["", " ", " ", ". ", "\n"]))
            elif kind < 0.9:
                out.append(r.choice(ODDITIES))
            elif kind < 0.97:
                out.append(r.choice(self.specials))
            else:
                out.append(chr(r.choice([r.randrange(0x20, 0x3000), r.randrange(0x3000, 0xD800), r.randrange(0x1F300, 0x1FAFF)])))
        return "".join(out)

    def number(self):
        r = self.r
        return r.choice([
            0, 1, -1, r.randrange(-1000, 1000), 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, -(10**45), 0.0, -0.0, 1.0, 0.1, 1e16, 1e15,
            1e-5, 1e-4, 1e20, 1e22, 1e300, 5e-324, r.random(), r.random() * 10 ** r.randrange(-20, 20), 123456789.123,
        ])

    def value(self, depth=0):
        r = self.r
        kind = r.random()
        if depth > 3 or kind < 0.35:
            return self.text(4)
        if kind < 0.55:
            return self.number()
        if kind < 0.7:
            return r.choice([None, True, False])
        if kind < 0.82:
            return [self.value(depth + 1) for _ in range(r.randrange(4))]
        return self.mapping(depth + 1)

    def mapping(self, depth=0):
        keys = ["location", "unit", "n", "items", "keys", "名前", "a/b", "", "type", "z", "get", "x\"y", "<k>", "values"]
        return {self.r.choice(keys): self.value(depth) for _ in range(self.r.randrange(4))}

    def arguments(self):
        kind = self.r.random()
        if kind < 0.75:
            return json.dumps(self.mapping(), ensure_ascii=self.r.random() < 0.5)
        if kind < 0.85:
            return self.r.choice(["", "{}", "[1, 2]", "null", "3", "\"s\"", "{\"a\": ", "not json", "{\"a\":1,\"a\":2}", " {\"a\" : 1.50} ", "{'a': 1}", "{\"a\":01}", "{\"a\":NaN}"])
        return json.dumps(self.mapping(), indent=2, ensure_ascii=False)

    def tool(self):
        r = self.r
        types = ["string", "number", "integer", "boolean", "array", "object"]
        properties = {}
        for name in r.sample(["location", "unit", "深さ", "opts", "q", "a b"], r.randrange(4)):
            prop = {"type": r.choice(types)}
            if r.random() < 0.6:
                prop["description"] = self.text(4)
            if r.random() < 0.3:
                prop["enum"] = [self.text(2) for _ in range(r.randrange(1, 3))]
            if r.random() < 0.3:
                prop["default"] = self.value(3)
            if prop["type"] == "array" and r.random() < 0.7:
                prop["items"] = {"type": r.choice(types)}
            if prop["type"] == "object" and r.random() < 0.5:
                prop["properties"] = {"x": {"type": r.choice(types)}}
            properties[name] = prop
        function = {"name": r.choice(["get_weather", "søk_日本", "f"]), "description": self.text(5), "parameters": {"type": "object", "properties": properties}}
        if r.random() < 0.4:
            function["parameters"]["required"] = list(properties)[:1]
        if r.random() < 0.2:
            function["strict"] = r.choice([True, False, None])
        if r.random() < 0.1:
            del function["description"]
        if r.random() < 0.1:
            function = dict(reversed(list(function.items())))
        return {"type": "function", "function": function} if r.random() < 0.9 else {"function": function, "type": "function", "vendor": 1}

    def content(self):
        kind = self.r.random()
        if kind < 0.75:
            return self.text()
        if kind < 0.8:
            return None
        return [self.part() for _ in range(self.r.randrange(4))]

    def part(self):
        if self.r.random() < 0.8:
            return {"type": "text", "text": self.text(5)}
        return self.r.choice([{"type": "input_text", "text": self.text(3)}, {"text": self.text(2), "type": "text"}, {"type": "refusal", "refusal": "no"}])

    def assistant(self):
        r = self.r
        message = {"role": "assistant", "content": self.content()}
        if r.random() < 0.3:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": r.choice(["get_weather", "f"]), "arguments": self.arguments()}}
                for i in range(r.choice([0, 1, 1, 1, 2]))
            ]
        if r.random() < 0.25:
            message["reasoning"] = r.choice([self.text(5), self.text(5), None])
        if r.random() < 0.1:
            message["reasoning_content"] = self.text(3)
        if r.random() < 0.05:
            del message["content"]
        return message

    def body(self):
        r = self.r
        messages = []
        if r.random() < 0.5:
            messages.append({"role": r.choice(["system", "system", "developer"]), "content": self.content()})
        for _ in range(r.choice([1, 1, 2, 3, 5])):
            messages.append({"role": "user", "content": self.content()})
            if r.random() < 0.6:
                answer = self.assistant()
                messages.append(answer)
                for call in answer.get("tool_calls") or []:
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.content()})
            if r.random() < 0.05:
                messages.append({"role": r.choice(["system", "developer"]), "content": self.content()})
        for message in messages:
            if r.random() < 0.05:
                message["name"] = r.choice(["alice", "", 7])
        body = {"model": "m", "messages": messages}
        if r.random() < 0.35:
            body["tools"] = [self.tool() for _ in range(r.randrange(1, 3))]
        if r.random() < 0.1:
            body["tool_choice"] = r.choice(["none", "auto", "required"])
        if r.random() < 0.3:
            names = ["enable_thinking", "thinking", "date_string", "foo", "bos_token", "builtin_tools", "model_identity", "tools_in_user_message"]
            values = {"builtin_tools": [["python"], ["browser", "f"], []], "date_string": ["01 Jan 2025"], "bos_token": ["<B>", ""], "model_identity": ["You are X."]}
            body["chat_template_kwargs"] = {name: r.choice(values.get(name, [True, False, None, "auto"])) for name in r.sample(names, r.randrange(3))}
        if r.random() < 0.15:
            body["reasoning_effort"] = r.choice(["none", "low", "medium", "high", None])
        if r.random() < 0.15:
            body["add_generation_prompt"] = r.random() < 0.5
        if r.random() < 0.08:
            body["continue_final_message"] = True
            body["add_generation_prompt"] = False
        if r.random() < 0.05:
            body["documents"] = [{"title": "t", "text": self.text(3)}]
        return body


def parts_text(parts, system):
    texts = []
    for part in parts:
        text = part[{"refusal": "refusal"}.get(part["type"], "text")]
        if system and text.startswith("x-anthropic-billing-header"):
            text = text.partition("\n")[2]
        if text:
            texts.append(text)
    return "\n".join(texts)


def normalise(message):
    role, content = message["role"], message.get("content")
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    out = {"role": role, "content": parts_text(content, role == "system")}
    if role == "assistant":
        if message.get("tool_calls"):
            out["tool_calls"] = copy.deepcopy(message["tool_calls"])
            for call in out["tool_calls"]:
                try:
                    arguments = json.loads(call["function"]["arguments"])
                except ValueError:
                    arguments = {}
                call["function"]["arguments"] = arguments if isinstance(arguments, dict) else {}
        if message.get("reasoning") is not None:
            out["reasoning"] = out["reasoning_content"] = message["reasoning"]
    if role == "tool":
        out["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def merge_developer(messages, template):
    if "'developer'" in template or '"developer"' in template or not any(m["role"] == "developer" for m in messages):
        return messages
    messages = [dict(m, role="system") if m["role"] == "developer" else m for m in messages]
    if not any(m["role"] == "system" for m in messages[1:]):
        return messages
    texts = [m["content"] for m in messages if m["role"] == "system" and m["content"]]
    return [{"role": "system", "content": "\n\n".join(texts)}] + [m for m in messages if m["role"] != "system"]


def tool_as_typed(tool):
    function = tool["function"]
    out = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        out["strict"] = function["strict"]
    return {"type": "function", "function": out}


def set_values(mapping):
    return {key: value for key, value in mapping.items() if value is not None and value != "auto"}


def reference(tokenizer, body):
    messages = merge_developer([normalise(m) for m in body["messages"]], tokenizer.chat_template)
    given = body.get("chat_template_kwargs") or {}
    kwargs = set_values(given)
    effort = body.get("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            kwargs["enable_thinking"] = effort != "none"
    tools = [tool_as_typed(tool) for tool in body["tools"]] if body.get("tools") else None
    text = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        documents=body.get("documents"),
        tokenize=False,
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False),
        **kwargs,
    )
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def main():
    directory, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    specials = list(tokenizer.get_added_vocab())[:60]
    source = Source(seed, specials)
    for number in range(count):
        body = source.body()
        text_body = json.dumps(body, ensure_ascii=source.r.random() < 0.3)
        line = {"id": number, "body": text_body}
        try:
            line["text"], line["ids"] = reference(tokenizer, json.loads(text_body))
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(line))


if __name__ == "__main__":
    main()
