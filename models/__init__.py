"""Language models for the engine: one Llama-family decoder, its checkpoints and its tokenizers."""

from models.checkpoint import LoadedModel as LoadedModel
from models.checkpoint import load as load
from models.checkpoint import save as save
from models.config import NAMED_CONFIGS as NAMED_CONFIGS
from models.config import ModelConfig as ModelConfig
from models.config import RopeScaling as RopeScaling
from models.config import named_config as named_config
from models.decoder import as_model as as_model
from models.decoder import plain_attend as plain_attend
from models.errors import CheckpointError as CheckpointError
from models.random_weights import random_params as random_params
from models.tokenizer import Detokenizer as Detokenizer
from models.tokenizer import Tokenizer as Tokenizer
