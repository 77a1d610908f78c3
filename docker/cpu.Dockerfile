# The environment of the tests, for P and D on CPUs:  docker build -f docker/cpu.Dockerfile -t layerpush-cpu:0.2.0 .
FROM python:3.11-slim
# The image's Debian release decides the versions.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu LAYERPUSH_CALM=1
COPY requirements/cpu.lock /src/cpu.lock
RUN python -m pip install --no-cache-dir --no-deps --requirement /src/cpu.lock
COPY . /src/layerpush
RUN python -m pip install --no-cache-dir --no-deps /src/layerpush && rm -rf /src
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
