"""Drives the official `anthropic` client against the router: messages, streams, tools, counts, errors, and being cut off.

usage: anthropic_client.py ROUTER_URL MODEL TOOL_MODEL CUTTING_MODEL
"""

import sys

import anthropic

base_url, model, tool_model, cutting_model = sys.argv[1:]
client = anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0, timeout=20)
messages = [{"role": "user", "content": "Say something."}]

answer = client.messages.create(model=model, max_tokens=8, system="Be brief.", messages=messages)
assert answer.type == "message" and answer.role == "assistant" and answer.model == model, answer
assert answer.content[0].type == "text" and answer.content[0].text, answer
assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 8, answer

counted = client.messages.count_tokens(model=model, system="Be brief.", messages=messages)
total = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
assert counted.input_tokens == total, (counted, answer.usage)

pieces = []
with client.messages.stream(model=model, max_tokens=12, system="Be brief.", messages=messages) as stream:
    for text in stream.text_stream:
        pieces.append(text)
    final = stream.get_final_message()
assert len(pieces) > 1 and "".join(pieces) == final.content[0].text, (pieces, final)
assert final.usage.output_tokens == 12 and final.stop_reason == "max_tokens", final

# The conversation goes on, and its beginning is where it was.
turns = messages + [{"role": "assistant", "content": final.content}, {"role": "user", "content": "And more?"}]
assert client.messages.create(model=model, max_tokens=4, messages=turns).content[0].text

# A client that leaves in mid-stream.
stream = client.messages.create(model=model, max_tokens=4000, messages=messages, stream=True)
assert next(iter(stream)).type == "message_start"
stream.close()

# Tools, whole and streamed: the worker asks for one, gets its result and answers.
tools = [
    {
        "name": "weather",
        "description": "The weather of a place",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
    }
]
for streams in [False, True]:
    question = [{"role": "user", "content": "What is the weather in Bonn?"}]
    arguments = {"model": tool_model, "max_tokens": 64, "tools": tools, "messages": question}
    if streams:
        with client.messages.stream(**arguments) as stream:
            asked = stream.get_final_message()
    else:
        asked = client.messages.create(**arguments)
    assert asked.stop_reason == "tool_use", asked
    call = [block for block in asked.content if block.type == "tool_use"][0]
    assert (call.name, call.input) == ("weather", {"place": "Bonn"}), call
    question += [
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
    ]
    told = client.messages.create(**arguments)
    assert told.stop_reason == "end_turn" and told.content[0].text == f"{call.id}: rain", told

# A worker that cuts its stream: the client must see an error, never a polite end.
received = 0
try:
    for event in client.messages.create(model=cutting_model, max_tokens=8, messages=messages, stream=True):
        received += event.type == "content_block_delta"
except anthropic.APIError as error:
    print("cut off:", type(error).__name__, error)
else:
    raise AssertionError("a cut stream ended politely")
assert received == 1, received

for call, expected in [
    (lambda: client.messages.create(model="absent", max_tokens=1, messages=messages), anthropic.NotFoundError),
    (lambda: client.messages.create(model=model, max_tokens=0, messages=messages), anthropic.BadRequestError),
    (lambda: client.messages.count_tokens(model="absent", messages=messages), anthropic.NotFoundError),
]:
    try:
        call()
    except expected as error:
        assert error.body["type"] == "error" and error.body["error"]["message"], error.body
        print("as expected:", type(error).__name__, error)
    else:
        raise AssertionError(f"no {expected.__name__}")
print("all good")
