"""Streams an answer through the router on port 8000, with OpenAI's client: python docs/examples/client.py MODEL"""

import sys

import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
prompt = "Layer by layer, the cache moves. " * 200
for event in client.completions.create(model=sys.argv[1], prompt=prompt, max_tokens=16, stream=True):
    print(event.choices[0].text, end="", flush=True)
print()
