# CPU image:   docker build -t spark .
# CUDA image:  docker build -t spark:cuda --build-arg DEVICE=cuda .
# PIP_EXTRA_INDEX_URL may name an index with CPU builds of torch, which are gigabytes smaller than the
# default ones for Linux.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG DEVICE=cpu
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL}
WORKDIR /src
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY . .
RUN case "${DEVICE}" in cpu) extra="" ;; cuda) extra="[gpu]" ;; \
      *) echo "DEVICE must be cpu or cuda, not ${DEVICE}" >&2; exit 1 ;; esac \
    && pip install --no-cache-dir -c constraints.txt ".${extra}"

FROM ${BASE_IMAGE}
ARG DEVICE=cpu
# libgomp1: without it numba falls back to a threading layer that gets in the way of torch's.
# gcc: Triton builds the launchers of its kernels when they first run.
# hadolint ignore=DL3008
RUN apt-get update \
    && set -- libgomp1 \
    && if [ "${DEVICE}" = cuda ]; then set -- "$@" gcc libc6-dev; fi \
    && apt-get install -y --no-install-recommends "$@" \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --home-dir /var/lib/spark --uid 1000 spark
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/var/lib/spark/.cache/numba \
    HF_HOME=/var/lib/spark/.cache/huggingface \
    SPARK_HOST=0.0.0.0 \
    SPARK_PORT=8000
USER 1000
WORKDIR /var/lib/spark
RUN mkdir -p .cache/numba .cache/huggingface
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['SPARK_PORT']}/ready\", timeout=4)"]
ENTRYPOINT ["serve"]
