# The main job where there is no Linux:
#     docker build -t realhf .
#     docker run --rm --init -v "$PWD/runs:/realhf/runs" realhf
#     docker run --rm --init -v "$PWD/runs:/realhf/runs" realhf make train SEED=2 ARGS=total_train_steps=10
FROM python:3.11-slim-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap gcc git libc6-dev make openssl \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /realhf
COPY . .
RUN make install
ENV PATH=/realhf/.venv/bin:$PATH

CMD ["make", "train"]
