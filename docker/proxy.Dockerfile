# The proxy alone:  docker build -f docker/proxy.Dockerfile -t layerpush-proxy:0.2.0 .
FROM python:3.12-slim
COPY . /src/layerpush
RUN python -m pip install --no-cache-dir "/src/layerpush[proxy]" && rm -rf /src/layerpush
ENTRYPOINT ["layerpush", "proxy"]
