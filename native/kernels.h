// Every kernel file's bindings.
#pragma once

#include "bind.h"

namespace ostinato {

void bind_attention(Module& module);
void bind_causal_conv1d(Module& module);
void bind_concat(Module& module);
void bind_embedding(Module& module);
void bind_encoder_attention(Module& module);
void bind_linear(Module& module);
void bind_moe(Module& module);
void bind_norm(Module& module);
void bind_probe(Module& module);
void bind_rotary(Module& module);
void bind_route(Module& module);
void bind_sample(Module& module);
void bind_ssd_scan(Module& module);
void bind_state_update(Module& module);
void bind_token_shift(Module& module);

inline void bind_kernels(Module& module) {
    bind_attention(module);
    bind_causal_conv1d(module);
    bind_concat(module);
    bind_embedding(module);
    bind_encoder_attention(module);
    bind_linear(module);
    bind_moe(module);
    bind_norm(module);
    bind_probe(module);
    bind_rotary(module);
    bind_route(module);
    bind_sample(module);
    bind_ssd_scan(module);
    bind_state_update(module);
    bind_token_shift(module);
}

}  // namespace ostinato
