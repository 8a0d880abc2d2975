"""Drives the official `openai` client against the router: list, complete, stream, tools, embeddings, responses and their
tokens, leave, and be cut off.

usage: openai_client.py ROUTER_URL MODEL TOOL_MODEL CUTTING_MODEL
"""

import json
import sys

import openai

base_url, model, tool_model, cutting_model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0, timeout=20)
messages = [{"role": "user", "content": "Say something."}]

models = client.models.list().data
assert model in [entry.id for entry in models], models
assert client.models.retrieve(model).id == model

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
assert answer.choices[0].message.content, answer
assert answer.usage.completion_tokens == 8, answer.usage

text = client.completions.create(model=model, prompt="Once upon a time", max_tokens=4)
assert text.choices[0].text, text

pieces, usage = [], None
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        pieces.append(chunk.choices[0].delta.content)
    usage = chunk.usage or usage
assert len(pieces) > 1 and usage.completion_tokens == 12, (pieces, usage)

vectors = client.embeddings.create(model=model, input=["one", "two", "one"]).data
assert [entry.index for entry in vectors] == [0, 1, 2], vectors
assert vectors[0].embedding == vectors[2].embedding != vectors[1].embedding, vectors

response = client.responses.create(model=model, instructions="Be brief.", input="Say something.", max_output_tokens=8)
assert response.output_text and response.usage.output_tokens == 8, response
counted = client.responses.input_tokens.count(model=model, instructions="Be brief.", input="Say something.")
assert counted.input_tokens == response.usage.input_tokens, (counted, response.usage)

# Tools, whole and streamed.
tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
question = [{"role": "user", "content": "What is the weather in Bonn?"}]
asked = client.chat.completions.create(model=tool_model, messages=question, tools=tools).choices[0]
call = asked.message.tool_calls[0]
assert asked.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"place": "Bonn"}, asked
arguments = ""
for chunk in client.chat.completions.create(model=tool_model, messages=question, tools=tools, stream=True):
    for part in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
        arguments += part.function.arguments or ""
assert json.loads(arguments) == {"place": "Bonn"}, arguments
question += [asked.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
told = client.chat.completions.create(model=tool_model, messages=question, tools=tools).choices[0].message.content
assert told == f"{call.id}: rain", told

# A client that leaves in mid-stream.
stream = client.chat.completions.create(model=model, messages=messages, max_tokens=4000, stream=True)
next(iter(stream))
stream.close()

# A worker that cuts its stream: the client must see an error, never a polite end.
received = 0
try:
    for chunk in client.chat.completions.create(model=cutting_model, messages=messages, stream=True):
        received += 1
except openai.APIError as error:
    print("cut off:", type(error).__name__, error)
else:
    raise AssertionError("a cut stream ended politely")
assert received == 1, received

for call, expected in [
    (lambda: client.chat.completions.create(model="absent", messages=messages), openai.NotFoundError),
    (lambda: client.models.retrieve("absent"), openai.NotFoundError),
    (lambda: client.chat.completions.create(model=model, messages="nonsense"), openai.BadRequestError),
    (lambda: client.embeddings.create(model="absent", input="x"), openai.NotFoundError),
    (lambda: client.responses.input_tokens.count(model=model), openai.BadRequestError),
]:
    try:
        call()
    except expected as error:
        print("as expected:", type(error).__name__, error)
    else:
        raise AssertionError(f"no {expected.__name__}")
print("all good")
