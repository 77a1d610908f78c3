"""The list of models whose layers call no hook: from the source of vLLM, or of an imitation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docgen.hooks import VllmSource
from tests.quotes import package

BASE = "model_executor/layers/attention"
MODULES = {
    f"{BASE}/base.py": "class AttentionLayerBase: ...",
    f"{BASE}/__init__.py": "from vllm.model_executor.layers.attention.attention import Attention",
    f"{BASE}/attention.py": """
from vllm.model_executor.layers.attention.base import AttentionLayerBase
class Attention(AttentionLayerBase):
    def forward(self, x):
        torch.ops.vllm.attend(x)
@maybe_transfer_kv_layer
def attend(x): ...
""",
    "model_executor/layers/mamba.py": """
from .attention.base import AttentionLayerBase
class MambaBase(AttentionLayerBase): ...
class Mixer(MambaBase):
    def forward(self, x): ...
""",
    "model_executor/models/registry.py": """
_MODELS = {"OldForCausalLM": ("old", "Old"), "NewForCausalLM": ("vllm.models.new", "New")}
_DRAFTS = {"NewMTP": ("vllm.models.new.nvidia.mtp", "NewMTP")}
""",
}


def rows(
    root: Path, layer: str, module: str = "model_executor/models/old.py", early: tuple[str, ...] = ()
) -> list[tuple[list[str], list[str], list[str]]]:
    imported = "from vllm.model_executor.layers.attention import Attention\n"
    for path, text in {**MODULES, module: imported + layer}.items():
        file = root / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return VllmSource(root / "vllm").rows(early)


@pytest.mark.parametrize(
    "layer",
    [
        "Own = Attention()",
        "class Own(Attention): ...",
        "class Own(Attention):\n    def forward(self, x): return super().forward(x)",
        "class Own(Attention):\n    def forward(self, x): return self.run(x)\n    def run(self, x): attend(x)",
        "class Own(Attention):\n    def forward(self, x): ...\n    def forward_cuda(self, x): super().forward(x)",
        "from ..layers.mamba import Mixer\nclass Own(Mixer): ...",
        "class Own(nn.Module):\n    def forward(self, x): ...",
    ],
)
def test_layers_that_call_a_hook_or_have_no_kv_are_not_listed(tmp_path: Path, layer: str) -> None:
    assert rows(tmp_path, layer) == []


@pytest.mark.parametrize(
    "layer",
    [
        "class Own(Attention):\n    def forward(self, x): return self.impl.forward(x)",
        "class Own(Attention):\n    def forward(self, x): return self.run(x)\n    def run(self, x): super().other(x)",
        "class Base(Attention):\n    def forward(self, x): ...\nclass Own(Base): ...",
        "class Attention(Attention):\n    def forward(self, x): ...",
    ],
)
def test_layers_with_their_own_attention_are_listed(tmp_path: Path, layer: str) -> None:
    ((architectures, early, names),) = rows(tmp_path, layer)
    assert (architectures, early) == (["OldForCausalLM"], [])
    assert names == [re.findall(r"class (\w+)", layer)[-1]], "a subclass stands for its bases"


def test_known_classes_have_their_own_column(tmp_path: Path) -> None:
    layer = "\n".join(f"class {name}(Attention):\n    def forward(self, x): ..." for name in ("Own", "Other"))
    found = rows(tmp_path, layer, early=("vllm.model_executor.models.old.Own", "vllm.models.new.Other"))
    assert found == [(["OldForCausalLM"], ["Own"], ["Other"])]


def test_all_architectures_of_a_package_are_named(tmp_path: Path) -> None:
    layer = "class Own(Attention):\n    def forward(self, x): ..."
    assert rows(tmp_path, layer, "models/new/nvidia/model.py") == [(["NewForCausalLM", "NewMTP"], [], ["Own"])]


def test_layers_of_other_platforms_are_not_listed(tmp_path: Path) -> None:
    assert rows(tmp_path, "class Own(Attention):\n    def forward(self, x): ...", "models/new/amd/model.py") == []


def test_imported_layers_are_listed_for_the_model_that_creates_them(tmp_path: Path) -> None:
    rows(tmp_path, "class Own(Attention):\n    def forward(self, x): ...", "model_executor/models/shared.py")
    made = "from vllm.model_executor.models.shared import Own\ncache = Own()"
    assert rows(tmp_path, made, "models/new/model.py") == [(["NewForCausalLM", "NewMTP"], [], ["Own"])]


def test_unhooked_layers_of_the_installed_vllm_are_found() -> None:
    names = {layer.node.name for layer in VllmSource(package("vllm")).unhooked()}
    assert names >= {"DeepseekV32Attention", "DeepseekV32IndexerCache", "DeepseekV4Attention", "InklingAttention"}
    assert not names & {"Attention", "MLAAttention", "ChunkedLocalAttention", "MambaMixer2", "CacheOnlyAttentionLayer"}
