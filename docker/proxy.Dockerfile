# The proxy alone:
#   docker build -f docker/proxy.Dockerfile --build-arg DIGEST=sha256:... -t layerpush-proxy:0.2.0 .
# The digest is the base image's: docker buildx imagetools inspect python:3.12-slim
ARG DIGEST
FROM python:3.12-slim@${DIGEST}
COPY requirements/proxy.lock /src/proxy.lock
RUN python -m pip install --no-cache-dir --no-deps --require-hashes --requirement /src/proxy.lock
COPY . /src/layerpush
RUN python -m pip install --no-cache-dir --no-index --no-build-isolation "/src/layerpush[proxy]" && rm -rf /src
RUN useradd --create-home --uid 10001 layerpush
USER 10001:10001
ENTRYPOINT ["layerpush", "proxy"]
