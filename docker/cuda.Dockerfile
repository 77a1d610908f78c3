# layerpush on vLLM's image, for P and D on GPUs:  docker build -f docker/cuda.Dockerfile -t layerpush-cuda:0.2.0 .
FROM vllm/vllm-openai:v0.32.0
COPY . /src/layerpush
RUN python3 -m pip install --no-cache-dir "/src/layerpush[cuda]" && rm -rf /src/layerpush
ENTRYPOINT ["vllm", "serve"]
