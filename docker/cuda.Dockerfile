# layerpush on vLLM's image, for P and D on GPUs:
#   docker build -f docker/cuda.Dockerfile --build-arg DIGEST=sha256:... -t layerpush-cuda:0.2.0 .
# The digest is the base image's: docker buildx imagetools inspect vllm/vllm-openai:v0.32.0
ARG DIGEST
FROM vllm/vllm-openai:v0.32.0@${DIGEST}
COPY requirements/cuda.lock /src/cuda.lock
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --requirement /src/cuda.lock
COPY . /src/layerpush
# The image has all other packages: without an index, pip refuses to go on if it has not.
RUN python3 -m pip install --no-cache-dir --no-index --no-build-isolation "/src/layerpush[cuda]" && rm -rf /src
RUN useradd --create-home --uid 10001 layerpush
USER 10001:10001
ENTRYPOINT ["vllm", "serve"]
