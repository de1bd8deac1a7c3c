# docker build -t gshard . && docker run -it gshard
# With GPUs: docker build --build-arg JAX='jax[cuda12]' -t gshard . && docker run --gpus all -it gshard
FROM python:3.12-slim
ARG JAX=jax
ARG EXTRA=mt
WORKDIR /gshard
COPY pyproject.toml README.md LICENSE ./
COPY gshard gshard
# The versions are those of pyproject.toml.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[${EXTRA}]" "${JAX}"
ENTRYPOINT ["gshard"]
CMD ["--help"]
