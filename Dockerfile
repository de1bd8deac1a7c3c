# docker build -t gshard . && docker run -it gshard
# With GPUs: docker build --build-arg JAX='jax[cuda12]' -t gshard . && docker run --gpus all -it gshard
# A tag is moved by its owner, a digest is not: for production, build with
#   --build-arg BASE=python:3.12-slim@$(docker buildx imagetools inspect python:3.12-slim --format '{{.Manifest.Digest}}')
# and keep the digest that this printed beside the release.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG JAX=jax
ARG EXTRA=mt
WORKDIR /gshard
COPY pyproject.toml README.md LICENSE ./
COPY gshard gshard
# The versions are those of pyproject.toml.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[${EXTRA}]" "${JAX}" \
    && useradd --uid 10001 --home-dir /cache --create-home gshard
ENV XDG_CACHE_HOME=/cache
WORKDIR /cache
USER 10001:10001
ENTRYPOINT ["gshard"]
CMD ["--help"]
