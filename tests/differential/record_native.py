#!/usr/bin/env python3
"""Records what engines make of chats that they render in code, and of Responses bodies.

    record_native.py VLLM SGLANG OUT      VLLM, SGLANG: the unpacked wheels of vllm(-cpu) 0.32.0 and sglang 0.5.18

Writes OUT/{deepseek_v4,harmony,responses}.jsonl: {"id", "engine", "model", "body", "text"} or {..., "messages"} or
{..., "error"}. The engines' own functions run; what surrounds them and needs a GPU stack is stated here, with its
source. Needs transformers, openai and oss-harmony 0.0.11; `tests/prompt_native.rs` reads the files.
"""
import ast
import copy
import datetime
import importlib.util
import json
import pathlib
import random
import sys
import types
from typing import Any, Iterable, Optional  # noqa: F401  (names that extracted functions use)

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import prompt_reference as chat  # noqa: E402

SPECIALS = ["<think>", "</think>", "<｜User｜>", "<｜end▁of▁sentence｜>", "｜DSML｜", "<tool_result>"]
DATE = "2026-01-15"


def module(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def stub(name, **members):
    found = types.ModuleType(name)
    found.__dict__.update(members)
    sys.modules[name] = found
    return found


def extracted(path, names, scope):
    """Functions and methods of a file by name, as plain functions in `scope`."""
    tree = ast.parse(pathlib.Path(path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list, node.returns = [], None
            for argument in node.args.args + node.args.kwonlyargs:
                argument.annotation = None
            exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    return scope


# vLLM: DeepSeek-V4 ---------------------------------------------------------------------------------------------------


def vllm_deepseek_v4(root):
    package = stub("v")
    package.__path__ = [str(root / "vllm/tokenizers")]
    stub("vllm")
    stub("vllm.renderers")
    stub("vllm.renderers.chat_utils", ChatCompletionMessageParam=dict)
    stub("v.hf", HfTokenizer=object, get_cached_tokenizer=None)
    stub("v.protocol", TokenizerLike=object)
    stub("transformers", TokenizersBackend=object)
    module(root / "vllm/tokenizers/deepseek_v4_encoding.py", "v.deepseek_v4_encoding")
    wrap = module(root / "vllm/tokenizers/deepseek_v4.py", "v.deepseek_v4").get_deepseek_v4_tokenizer

    class Tokenizer:
        def get_added_vocab(self):
            return {}

    tokenizer = wrap(Tokenizer())

    def render(body):
        messages = [vllm_message(message) for message in body["messages"]]
        kwargs = chat.set_values(body.get("chat_template_kwargs") or {})
        effort = body.get("reasoning_effort")
        if effort is not None:
            kwargs["reasoning_effort"] = effort
            if "enable_thinking" not in (body.get("chat_template_kwargs") or {}):
                kwargs["enable_thinking"] = effort != "none"
        tools = [chat.tool_as_typed(tool) for tool in body["tools"]] if body.get("tools") else None
        kwargs.pop("tokenize", None)
        return tokenizer.apply_chat_template(messages, tools=tools, conversation=messages, tokenize=False, **kwargs)

    return render


def vllm_message(message):
    """`_parse_chat_message_content` of vLLM's `renderers/chat_utils.py` with content_format "openai"."""
    out = chat.normalise(message)
    content = message.get("content")
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = []
    for part in content:
        text = part["refusal" if part["type"] == "refusal" else "text"]
        if message["role"] == "system" and text.startswith("x-anthropic-billing-header"):
            text = text.partition("\n")[2]
            if not text:
                continue
        parts.append({"type": "text", "text": text})
    out["content"] = "\n".join(part["text"] for part in parts) if message["role"] == "tool" else parts
    for name in ("task",):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    if message["role"] == "developer":
        out["tools"] = message.get("tools")
    return out


# SGLang: DeepSeek-V4 -------------------------------------------------------------------------------------------------


def sglang_deepseek_v4(root, profile):
    encoding = module(root / "sglang/srt/entrypoints/openai/encoding_dsv4.py", "encoding_dsv4")

    def typed(message):
        out = {"role": message["role"], "content": message.get("content")}
        if isinstance(out["content"], list):
            texts = [part["text"] for part in out["content"] if part["type"] in ("text", "input_text")]
            if len(texts) != len(out["content"]):
                raise ValueError("a part that SGLang does not take")
            out["content"] = " ".join(texts)
        if out["content"] is None:
            out["content"] = ""
        if message["role"] == "user":
            return out
        for name in ("tool_call_id", "name", "reasoning_content", "tool_calls"):
            if message.get(name) is not None:
                out[name] = copy.deepcopy(message[name])
        for call in out.get("tool_calls") or []:
            import orjson

            arguments = orjson.loads(call["function"]["arguments"])
            if not isinstance(arguments, dict):
                raise ValueError("arguments that are no object")
            call["function"]["arguments"] = arguments
        return out

    def render(body):
        """The dsv4 path of `_apply_jinja_template` in `serving_chat.py`."""
        messages = [typed(message) for message in body["messages"]]
        if messages[-1]["role"] == "assistant":
            messages[-1] = {"role": "user", "content": messages[-1]["content"]}
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        if body.get("tools"):
            messages[0]["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "description": tool["function"].get("description"),
                        "name": tool["function"]["name"],
                        "parameters": tool["function"].get("parameters"),
                        "strict": tool["function"].get("strict", False),
                    },
                    "defer_loading": None,
                }
                for tool in body["tools"]
            ]
        kwargs = dict(body.get("chat_template_kwargs") or {})
        effort = body.get("reasoning_effort")
        if effort is not None:
            kwargs.setdefault("thinking", effort != "none")
        mode = "thinking" if kwargs.get("thinking", False) else "chat"
        if body.get("task") is not None:
            encoding.attach_task_to_last_user_message(messages, body["task"])
        return encoding.encode_messages(
            messages,
            thinking_mode=mode,
            reasoning_effort=effort if effort in encoding.REASONING_EFFORT_PROFILES[profile] else None,
            reasoning_effort_profile=profile,
        )

    return render


def deepseek_body(source, engine):
    body = source.body()
    r = source.r
    for name in ("continue_final_message", "add_generation_prompt", "documents", "tool_choice"):
        body.pop(name, None)
    if r.random() < 0.5:
        body["chat_template_kwargs"] = {r.choice(["thinking", "enable_thinking"]): r.choice([True, False])}
        if r.random() < 0.2:
            body["chat_template_kwargs"]["drop_thinking"] = False
    if r.random() < 0.4:
        body["reasoning_effort"] = r.choice(["none", "low", "medium", "high", "max"])
    for message in body["messages"]:
        message.pop("name", None)
        if message["role"] == "assistant" and r.random() < 0.5:
            message["reasoning" if engine == "vllm" else "reasoning_content"] = source.text(4)
        if engine == "vllm" and message["role"] == "user" and r.random() < 0.05:
            message["task"] = r.choice(["action", "query", "title", "no-such-task"])
    if engine == "vllm" and r.random() < 0.1:
        body["messages"].insert(r.randrange(len(body["messages"]) + 1), {"role": "latest_reminder", "content": source.text(3)})
    if engine == "sglang" and r.random() < 0.1:
        body["task"] = r.choice(["action", "query"])
    calls = [m for m in body["messages"] if len(m.get("tool_calls") or []) > 1]
    if calls and r.random() < 0.7:
        at = body["messages"].index(calls[0])
        end = at + 1
        while end < len(body["messages"]) and body["messages"][end]["role"] == "tool":
            end += 1
        body["messages"][at + 1 : end] = reversed(body["messages"][at + 1 : end])
    return body


# vLLM: harmony -------------------------------------------------------------------------------------------------------


def vllm_harmony(root):
    import openai_harmony as h

    stub("envs")
    envs = types.SimpleNamespace(VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS=False, VLLM_SYSTEM_START_DATE=DATE)

    class Tool:  # ChatCompletionToolsParam
        def __init__(self, tool):
            self.type = tool.get("type", "function")
            function = tool["function"]
            self.function = types.SimpleNamespace(
                name=function["name"], description=function.get("description"), parameters=function.get("parameters")
            )

    scope = {
        **{name: getattr(h, name) for name in dir(h)},
        "envs": envs, "datetime": datetime, "ChatCompletionToolsParam": Tool, "VLLMValidationError": lambda text, **_: ValueError(text),
        "REASONING_EFFORT": {"high": h.ReasoningEffort.HIGH, "medium": h.ReasoningEffort.MEDIUM, "low": h.ReasoningEffort.LOW},
        "_harmony_encoding": None,
    }
    names = {
        "get_encoding", "get_system_message", "create_tool_definition", "get_developer_message", "get_user_message",
        "get_system_or_developer_message", "parse_chat_inputs_to_harmony_messages", "auto_drop_analysis_messages",
        "flatten_input_text_content", "extract_instructions_from_messages", "build_harmony_preamble",
        "parse_chat_input_to_harmony_message", "render_for_completion", "_use_legacy_tool_call_headers",
    }
    scope = extracted(root / "vllm/entrypoints/openai/parser/harmony_utils.py", names, scope)

    def render(body):
        """`_make_request_with_harmony` of vLLM's `renderers/online_renderer.py`."""
        instructions, messages = scope["extract_instructions_from_messages"](list(body["messages"]))
        effort = body.get("reasoning_effort")
        if effort == "none":
            raise ValueError("no such effort")
        tools = [Tool(tool) for tool in body["tools"]] if body.get("tools") else None
        turns = scope["build_harmony_preamble"](
            instructions=instructions, tools=tools, reasoning_effort=effort, with_custom_tools=tools is not None
        )
        turns.extend(scope["parse_chat_inputs_to_harmony_messages"](messages))
        ids = scope["render_for_completion"](turns)
        return ids, scope["get_encoding"]().decode_utf8(ids)

    return render


def harmony_body(source):
    r = source.r
    body = source.body()
    for name in ("continue_final_message", "add_generation_prompt", "documents", "tool_choice", "chat_template_kwargs"):
        body.pop(name, None)
    if r.random() < 0.4:
        body["reasoning_effort"] = r.choice(["low", "medium", "high", "none"])
    for message in body["messages"]:
        message.pop("name", None)
        if isinstance(message.get("content"), list):
            message["content"] = [{"type": "text", "text": source.text(4)} for _ in message["content"]]
        for name in ("reasoning", "reasoning_content"):
            message.pop(name, None)
        if message.get("tool_calls") == []:
            del message["tool_calls"]
        if message["role"] == "assistant" and r.random() < 0.5:
            message["reasoning"] = source.text(4)
    for tool in body.get("tools") or []:
        for prop in tool["function"]["parameters"]["properties"].values():
            if isinstance(prop.get("default"), (dict, list, float)) or isinstance(prop.get("default"), int) and abs(prop["default"]) > 2**60:
                prop["default"] = r.choice(["x", 3, True, None])
            if r.random() < 0.1:
                prop.update(r.choice([{"nullable": True}, {"title": "T"}, {"type": ["integer", "null"]}, {"anyOf": [{"type": "string"}]}]))
    return body


# Responses -----------------------------------------------------------------------------------------------------------


def vllm_responses(root):
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
    from openai.types.responses.response_function_tool_call_output_item import ResponseFunctionToolCallOutputItem
    from pydantic import ValidationError

    logger = types.SimpleNamespace(debug=lambda *_: None, warning=lambda *_: None)
    scope = {
        **globals(), "ValidationError": ValidationError, "logger": logger, "random_uuid": lambda: "0", "Iterable": Iterable,
        "ResponseFunctionToolCall": ResponseFunctionToolCall, "ResponseOutputMessage": ResponseOutputMessage,
        "ResponseReasoningItem": ResponseReasoningItem, "ResponseFunctionToolCallOutputItem": ResponseFunctionToolCallOutputItem,
        "ChatCompletionMessageToolCallParam": dict, "FunctionCallTool": dict, "ChatCompletionAssistantMessageParam": dict,
        "ChatCompletionToolMessageParam": dict, "VLLMValidationError": lambda text, **_: ValueError(text),
        "ChatCompletionMessageParam": dict, "ResponseInputOutputItem": dict,
        "flat_namespace_tool_name": lambda namespace, name: f"{namespace}__{name}",
    }
    extracted(root / "vllm/entrypoints/openai/responses/protocol.py", {"input_item_parsing"}, scope)
    names = {
        "_item_type", "_item_dict", "should_continue_final_message", "construct_input_messages",
        "construct_chat_messages_with_tool_call", "_construct_message_from_response_item",
    }
    extracted(root / "vllm/entrypoints/openai/responses/utils.py", names, scope)

    def convert(body):
        data = scope["input_item_parsing"](None, copy.deepcopy(body))
        messages = scope["construct_input_messages"](request_instructions=data.get("instructions"), request_input=data["input"])
        return messages, scope["should_continue_final_message"](data["input"])

    return convert


def sglang_responses(root):
    import orjson
    from openai.types.responses import ResponseReasoningItem

    scope = {**globals(), "orjson": orjson, "ResponseReasoningItem": ResponseReasoningItem, "ResponsesRequest": object,
             "ResponsesResponse": object, "ChatCompletionMessageParam": dict}
    path = root / "sglang/srt/entrypoints/openai/serving_responses.py"
    names = {"_normalize_response_content_part_for_chat", "_normalize_response_message_for_chat",
             "_merge_consecutive_assistant_messages", "_construct_input_messages"}
    extracted(path, names, scope)
    holder = types.SimpleNamespace()
    holder._normalize_response_content_part_for_chat = scope["_normalize_response_content_part_for_chat"]
    holder._normalize_response_message_for_chat = lambda item: scope["_normalize_response_message_for_chat"](holder, item)
    holder._merge_consecutive_assistant_messages = scope["_merge_consecutive_assistant_messages"]

    def convert(body):
        request = types.SimpleNamespace(instructions=body.get("instructions"), input=copy.deepcopy(body["input"]))
        return scope["_construct_input_messages"](holder, request), False

    return convert


def responses_body(source):
    r = source.r
    body = {"model": "m"}
    if r.random() < 0.4:
        body["instructions"] = r.choice([source.text(4), source.text(4), "", None])
    if r.random() < 0.15:
        body["input"] = source.text()
        return body
    items = []
    for turn in range(r.choice([1, 2, 2, 3])):
        if r.random() < 0.15:
            items.append({"role": r.choice(["system", "developer"]), "content": source.text(3)})
        content = source.text(6)
        if r.random() < 0.4:
            content = [{"type": "input_text", "text": source.text(4)} for _ in range(r.randrange(1, 3))]
        item = {"role": "user", "content": content}
        if r.random() < 0.5:
            item["type"] = "message"
        items.append(item)
        if r.random() < 0.3:
            texts = [{"type": r.choice(["summary_text"]), "text": source.text(2) + "s"} for _ in range(r.randrange(2))]
            items.append({"type": "reasoning", "summary": texts})
            if r.random() < 0.6:
                items[-1]["content"] = [{"type": "reasoning_text", "text": source.text(3) + "r"}]
        if r.random() < 0.6:
            answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": source.text(4)} for _ in range(r.choice([1, 1, 2]))]}
            if r.random() < 0.3:
                answer["content"] = source.text(4)
            if r.random() < 0.5:
                answer.update(id=f"msg_{turn}", status="completed")
            items.append(answer)
        for call in range(r.choice([0, 0, 1, 2])):
            name = f"call_{turn}_{call}"
            items.append({"type": "function_call", "call_id": name, "name": r.choice(["get_weather", "f"]), "arguments": source.arguments()})
            if r.random() < 0.5:
                items[-1].update(id=f"fc_{call}", status="completed")
            output = source.text(3)
            if r.random() < 0.2:
                output = [{"type": "input_text", "text": source.text(2)}]
            items.append({"type": "function_call_output", "call_id": name, "output": output})
        if r.random() < 0.3:
            items.append({"role": "assistant", "content": source.text(3)})
    if items[-1].get("role") == "assistant" and r.random() < 0.5:
        items[-1].update(status="in_progress", type="message", id="msg_x")
    body["input"] = items
    return body


def write(path, lines):
    with open(path, "w") as out:
        for line in lines:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def recorded(number, engine, model, body, make):
    line = {"id": f"{model}-{engine}-{number}", "engine": engine, "model": model, "body": body}
    try:
        line.update(make(json.loads(json.dumps(body))))
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:200]
    return line


def main():
    vllm, sglang, out = (pathlib.Path(argument) for argument in sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    harmony = vllm_harmony(vllm)
    responses = {"vllm": vllm_responses(vllm), "sglang": sglang_responses(sglang)}
    encoders = {
        ("vllm", "official"): vllm_deepseek_v4(vllm),
        ("sglang", "official"): sglang_deepseek_v4(sglang, "official"),
        ("sglang", "preview"): sglang_deepseek_v4(sglang, "preview"),
    }
    lines = []
    for (engine, profile), render in encoders.items():
        source = chat.Source(7, SPECIALS)
        for number in range(50):
            body = deepseek_body(source, engine)
            lines.append(recorded(number, engine, f"deepseek_v4_{profile}", body, lambda body: {"text": render(body)}))
    write(out / "deepseek_v4.jsonl", lines)
    source, lines = chat.Source(11, ["<think>", "<|x|>"]), []
    for number in range(80):
        def make(body):
            ids, text = harmony(body)
            return {"text": text, "ids": ids}
        lines.append(recorded(number, "vllm", "harmony", harmony_body(source), make))
    write(out / "harmony.jsonl", lines)
    lines = []
    for engine, convert in responses.items():
        source = chat.Source(13, ["<think>", "</think>"])
        for number in range(60):
            def make(body):
                messages, is_open = convert(body)
                return {"messages": messages, "continues": is_open}
            lines.append(recorded(number, engine, "responses", responses_body(source), make))
    write(out / "responses.jsonl", lines)
    for name in ("deepseek_v4", "harmony", "responses"):
        lines = [json.loads(line) for line in open(out / f"{name}.jsonl")]
        print(name, len(lines), "errors", sum("error" in line for line in lines), file=sys.stderr)


if __name__ == "__main__":
    main()
