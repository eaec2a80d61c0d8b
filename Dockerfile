# The whole tree with its environment, on a CPU: the demo is what runs.
#
#   docker build --tag tisa .
#   docker run --name demo tisa && docker cp demo:/tisa/demo . && docker rm demo
#
# PyPI's torch for Linux brings CUDA's libraries, gigabytes that nothing here uses. Where an index of CPU builds is reached:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=ADDRESS --tag tisa .
FROM python:3.11-slim-bookworm

# What `make` is; and a C compiler, which torch.compile and Triton call.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1

RUN useradd --create-home --uid 1000 reader && mkdir /tisa && chown reader /tisa
USER 1000
WORKDIR /tisa

COPY --chown=1000 . .
RUN make .venv/.ready

CMD ["make", "demo"]
