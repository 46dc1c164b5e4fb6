# foldpipe in an image, for CPU or for NVIDIA GPUs; see docs/guides/containers.md.
#
#     docker build --target cpu --tag foldpipe:cpu .
#     docker build --target cuda --tag foldpipe:cuda .
#
# torch's wheels bring CUDA and NCCL themselves, so both begin with the same small system. Versions
# are those of requirements.lock.

ARG PYTHON=3.12

# The wheel, from this checkout.
FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY conf conf
COPY launcher launcher
COPY strategies strategies
RUN pip install --no-cache-dir --constraint requirements.lock build hatchling \
    && python -m build --wheel --no-isolation --outdir /wheel

# What both need around torch. g++ is for compile=true.
FROM python:${PYTHON}-slim AS system
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 foldpipe \
    && install --directory --owner=foldpipe /work
COPY --from=wheel /source/requirements.lock /wheel/
COPY --from=wheel /wheel/*.whl /wheel/
ENV PYTHONUNBUFFERED=1
WORKDIR /work
# What is asked of it is the command line: `docker run foldpipe:cpu pp=2`.
ENTRYPOINT ["foldpipe"]

# TORCH_INDEX names an index of wheels without CUDA, which make a far smaller image; without it
# torch is the same as below, which runs on CPUs as well.
FROM system AS cpu
ARG TORCH_INDEX=""
# hadolint ignore=DL3013
RUN torch="$(grep '^torch==' /wheel/requirements.lock)" \
    && pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch" \
    && pip install --no-cache-dir --constraint /wheel/requirements.lock \
        "$(echo /wheel/*.whl)[hf,tensorboard]"
USER 1000

FROM system AS cuda
# hadolint ignore=DL3013
RUN torch="$(grep '^torch==' /wheel/requirements.lock)" \
    && pip install --no-cache-dir "$torch" \
    && pip install --no-cache-dir --constraint /wheel/requirements.lock \
        "$(echo /wheel/*.whl)[hf,tensorboard]"
# For NVIDIA's container toolkit.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
