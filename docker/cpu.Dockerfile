# The environment of the tests, for P and D on CPUs:
#   docker build -f docker/cpu.Dockerfile --build-arg DIGEST=sha256:... -t layerpush-cpu:0.2.0 .
# The digest is the base image's: docker buildx imagetools inspect python:3.11-slim
ARG DIGEST
FROM python:3.11-slim@${DIGEST}
# The image's Debian release decides the versions.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY requirements/torch.lock requirements/cpu.lock /src/
RUN python -m pip install --no-cache-dir --no-deps --requirement /src/torch.lock && \
    python -m pip install --no-cache-dir --no-deps --require-hashes --requirement /src/cpu.lock
COPY . /src/layerpush
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation /src/layerpush && rm -rf /src
RUN useradd --create-home --uid 10001 layerpush
USER 10001:10001
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
