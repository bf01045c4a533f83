# A server of language models on CPUs, as a user without rights. MODEL is a model's directory, KEYS a file of one API key a line:
#   docker build -t twostroke .
#   docker run -p 127.0.0.1:8000:8000 -v "$PWD/MODEL:/model:ro" -v "$PWD/KEYS:/run/secrets/api-keys:ro" twostroke
# For nodes of a Ray cluster (deploy/kubernetes/rayservice.yaml): docker build --build-arg EXTRAS=ray -t twostroke-ray .
# The compiler stays in the first stage; torch alone comes from PyTorch's index of builds for CPUs. Versions are those that CI tested.
FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 twostroke && install -d -o twostroke /opt/twostroke /home/twostroke/source
USER twostroke
WORKDIR /home/twostroke/source
RUN python3 -m venv /opt/twostroke
COPY --chown=twostroke requirements.lock ./
RUN /opt/twostroke/bin/pip install --no-cache-dir --no-deps --constraint requirements.lock --index-url "$TORCH_INDEX_URL" torch
COPY --chown=twostroke pyproject.toml setup.py README.md LICENSE ./
COPY --chown=twostroke recipes ./recipes
COPY --chown=twostroke src ./src
RUN /opt/twostroke/bin/pip install --no-cache-dir --constraint requirements.lock ".${EXTRAS:+[$EXTRAS]}"
RUN /opt/twostroke/bin/twostroke doctor

FROM python:3.11-slim-bookworm
RUN useradd --create-home --uid 1000 twostroke && install -d -o twostroke /home/twostroke/.twostroke
COPY --from=build /opt/twostroke /opt/twostroke
USER twostroke
WORKDIR /home/twostroke
ENV PATH=/opt/twostroke/bin:/usr/local/bin:/usr/bin:/bin TWOSTROKE_HOME=/home/twostroke/.twostroke
VOLUME /home/twostroke/.twostroke
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["twostroke"]
CMD ["serve", "/model", "--host", "0.0.0.0", "--port", "8000", "--api-key-file", "/run/secrets/api-keys"]
