"""Drives the official `openai` client against the router: list, complete, stream, leave, and be cut off.

usage: openai_client.py ROUTER_URL MODEL CUTTING_MODEL
"""

import sys

import openai

base_url, model, cutting_model = sys.argv[1:]
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
]:
    try:
        call()
    except expected as error:
        print("as expected:", type(error).__name__, error)
    else:
        raise AssertionError(f"no {expected.__name__}")
print("all good")
