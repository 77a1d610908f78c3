# vLLM's router:
#   docker build -f docker/router.Dockerfile --build-arg DIGEST=sha256:... -t vllm-router:0.1.17 .
# The digest is the base image's: docker buildx imagetools inspect python:3.12-slim
ARG DIGEST
FROM python:3.12-slim@${DIGEST}
COPY requirements/vllm-router.lock /src/vllm-router.lock
RUN python -m pip install --no-cache-dir --no-deps --require-hashes --requirement /src/vllm-router.lock && rm -rf /src
RUN useradd --create-home --uid 10001 layerpush
USER 10001:10001
ENTRYPOINT ["vllm-router"]
