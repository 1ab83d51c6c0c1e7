"""Names, values and commands of other engines that have another name here, for messages. Imports little.

A name is written once for Python, for requests and, with hyphens, for flags. With a leading hyphen it is a flag alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

_SETTINGS = {
    "--model": "-m -mu model_path model_id model_name_or_path --model-url",
    "--model=OWNER/NAME, or OWNER/NAME:FILE.gguf": "-hf -hfr --hf-repo",
    "--model=OWNER/NAME:FILE.gguf": "-hff --hf-file",
    "--tokenizer": "tokenizer_path",
    "the environment variable HF_TOKEN": "hf_token -hft",
    "the environment variable HF_HUB_OFFLINE=1": "--offline",
    "--download-dir": "--huggingface-hub-cache",
    "the prompt as an argument: ostinato generate MODEL PROMPT": "-p --prompt",
    "ostinato chat": "-cnv --conversation -i --interactive",
    "--system": "-sys --system-prompt",
    "--file": "-f --prompts-file -bf --binary-file -sysf --system-prompt-file",
    "--image": "--mmproj-image",
    "--raw": "-no-cnv --no-conversation --ignore-chat-template",
    "--graph-mode=none": "enforce_eager disable_cuda_graph",
    "--graph-mode, --capture-sizes and --max-capture-size": "compilation_config -O -cc",
    "--max-capture-size": "cuda_graph_max_bs",
    "--capture-rows": "cuda_graph_bs cuda_graphs",
    "--overlap=on": "async_scheduling",
    "--dtype": "torch_dtype precision",
    "--quantization": "-q quantize",
    "--quantization=int8": "load_in_8bit",
    "--quantization=int4": "load_in_4bit",
    "--kv-cache-dtype=int8, for keys and values": "-ctk cache_type_k -ctv cache_type_v kv_bits quantized_kv_start"
    " kv_group_size",
    "--max-model-len": "-c n_ctx ctx_size num_ctx context_length max_total_tokens max_seq_len max_input_length"
    " max_kv_size",
    "--max-num-seqs": "-np --parallel max_running_requests max_concurrent_requests max_batch_size"
    " decode_concurrency max_num_active_seqs",
    "--max-num-batched-tokens": "-ub ubatch_size -b batch_size n_batch num_batch chunked_prefill_size"
    " max_prefill_tokens max_batch_prefill_tokens max_batch_total_tokens prefill_step_size prompt_concurrency"
    " max_num_scheduled_tokens",
    "--max-waiting": "--max-queued-requests --max-num-queued-reqs",
    "--max-body": "--payload-limit",
    "--threads": "-t -tb threads_batch n_threads num_thread cpu_threads",
    "--device": "device_map -dev device_ids",
    "--device=cuda": "-ngl gpu_layers n_gpu_layers num_gpu --gpus",
    "--tensor-parallel-size": "-tp tp tp_size num_shard num_gpus",
    "--replicas": "--data-parallel-size -dp --dp --dp-size",
    "--memory-utilization": "mem_fraction_static cuda_memory_fraction device_memory_utilization",
    "--enable-prefix-caching": "cache_prompt prefix_caching use_cache enable_radix_cache",
    "--no-enable-prefix-caching": "--disable-radix-cache --no-cache-prompt",
    "--no-enable-chunked-prefill": "--disable-chunked-prefill",
    "--cache-memory": "cache_ram kv_cache_memory num_gpu_blocks_override -cram prompt_cache_bytes prompt_cache_size",
    "--cache-offload, of what the prefix cache evicts": "kv_offloading_size kv_transfer_config"
    " kv_offloading_backend --prompt-cache-file --slot-save-path",
    "--state-cache-mode": "ctx_checkpoints -ctxcp --swa-checkpoints",
    "--state-block-size": "checkpoint_min_step -cms",
    "--scheduling-policy": "schedule_policy",
    "--speculative=draft:PATH:4": "-md model_draft spec_draft_model speculative_model speculative_draft_model_path"
    " draft_model spec_model --spec-draft-hf -hfd -hfrd --hf-repo-draft",
    "--speculative=ngram:4": "spec_type speculative_algorithm speculate num_speculative_tokens num_draft_tokens"
    " spec_method spec_tokens --spec-draft-n-max --draft-n --draft-max --spec-default",
    "--served-model-name": "-a --alias",
    "--cors-origin": "--allowed-origins --cors-origins --cors-allow-origin --allowed-methods --allowed-headers"
    " --allow-credentials --cors-methods --cors-headers --cors-credentials --no-cors-credentials",
    "--host": "--hostname --listen",
    "--port": "-P",
    "--ssl-certfile": "--ssl-cert-file",
    "--ssl-keyfile": "--ssl-key-file",
    "--request-timeout": "-to --timeout",
    "--log-level=warning": "--no-enable-log-requests --disable-log-requests --disable-uvicorn-access-log"
    " --log-disable --disable-access-log-for-endpoints",
    "--log-level=info": "--enable-log-requests --log-requests",
    "--log-level=debug": "-v --verbose --debug -lv --log-verbosity --log-verbose --verbosity --enable-log-outputs"
    " --enable-log-deltas --verbose-prompt",
    "--log-level": "--uvicorn-log-level",
    "--log-format=json": "--json-output --log-jsonl",
    "--root-path": "--api-prefix --fastapi-root-path",
    "--guide-lark, a grammar in Lark's form, not in GBNF": "--grammar --grammar-file",
    "--guide-json-schema, --guide-regex, --guide-choice or --guide-lark": "--guide",
    "--guide-json-schema": "-j --json-schema -jf --json-schema-file",
    "--chat-template": "--chat-template-file",
    "--chat-template-kwargs": "--default-chat-template-kwargs --chat-template-args --chat-template-config",
    "--random-weights": "dummy_weights",
    "--allow-remote-images, for those of http and https": "--allowed-media-domains",
    "--ssm-state-dtype": "mamba_cache_dtype",
    "--otlp-endpoint": "--otlp-traces-endpoint",
    "--drain-timeout": "--shutdown-timeout",
    "ostinato bench profile MODEL": "profiler_config --collect-detailed-traces --enable-layerwise-nvtx-tracing"
    " --perf --show-timings",
    "ostinato plan MODEL, which says what fits": "--list-devices -fitt --fit-target -fitc --fit-ctx",
    "ostinato doctor MODEL": "--check-tensors",
    "ostinato fetch OWNER/NAME": "-dr --docker-repo -cl --cache-list",
    "--num-problems": "--limit",
    "--tokenizer, a directory with that revision": "tokenizer_revision",
    "an option of ostinato itself, which its help shows": "--completion-bash",
}
"""Flag or setting here -> names of it."""
_PARAMETERS = {
    "max_tokens max_output_tokens num_predict options.num_predict": "-n --predict n_predict num_predict"
    " max_new_tokens max_gen_toks max_length max_completion_tokens",
    "min_tokens": "min_new_tokens min_length",
    "temperature": "temp",
    "temperature, where 0 is greedy": "do_sample",
    "repetition_penalty": "repeat_penalty rep_pen repetition",
    "stop stop_sequences": "-r --reverse-prompt stop_words stop_strings --extra-eos-token",
    "stop_token_ids": "eos_token_id",
    "seed": "-s random_seed",
    "n, and every output comes back": "best_of num_return_sequences num_outputs n_cmpl",
    "logprobs": "n_probs return_logprob details top_logprobs",
    "logit_bias": "logits_processors bad_words bad_words_ids allowed_token_ids",
    "skip_special_tokens": "-sp --special",
}
"""Sampling parameter, with its names in the served APIs -> other names of it."""
_FIELDS = {
    "instructions system messages": "system_prompt instruction",
    "prompt messages input": "inputs query content text",
    "tokens": "ids token_ids",
    "response_format text.format output_config.format guided_json json": "format json_schema schema output_format",
    "guided_regex guided_json": "regex",
    "response_format text.format output_config.format structured_outputs format": "guide",
    "guided_regex, or guided_json: grammars are read by the command line and in Python": "grammar ebnf lark"
    " guided_grammar",
    "reasoning_effort reasoning.effort output_config.effort": "effort",
    "reasoning_effort output_config.effort think reasoning_content thinking": "reasoning",
    "echo": "return_full_text",
    "timeout": "t_max_predict_ms",
    "tools": "functions",
}
"""Other fields of requests, in different endpoints -> names of the same in other engines, beside these."""
_DONE_BY = {
    'chat_template_kwargs, as {"enable_thinking": false}': "enable_thinking thinking think thinking_budget"
    " thinking_token_budget generation_prompt",
    "chat_template_kwargs, as variables of the template": "documents template_kwargs",
    "a setting of the server, --chat-template": "chat_template",
    "/v1/completions, with echo and logprobs": "prompt_logprobs",
    "another API, such as Ollama's: give its members as fields of the request": "options parameters sampling_params",
    "the answer's header x-request-id": "request_id session_id",
    "/v1/chat/completions, which has conversations": "tools tool_choice",
    "not served": "id_slot raw return_token_ids return_tokens_as_token_ids top_n_tokens add_special_tokens watermarking"
    " logprob_token_ids return_weight_versions routed_experts_prompt_start return_token_offsets return_prompt_text"
    " mm_payload return_mm_kwargs prompt_embeds kv_transfer_params ec_transfer_params vllm_xargs repetition_detection"
    " truncation_side n_indent n_cache_reuse response_fields return_progress post_sampling_probs dynatemp_exponent"
    " return_tokens dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold min_keep",
    "not needed, as it is so in any case": "timings_per_token sse_ping_interval parse_tool_calls reasoning_format",
    "an argument of OpenAI's Python client: give its members as fields of the request": "extra_body",
}
"""Counterparts here -> fields of other engines' requests."""
_NOT_NEEDED = {
    "no code of a checkpoint is ever run": "trust_remote_code code_revision",
    "stats() and /metrics have them": "disable_log_stats --metrics --enable-metrics kv_cache_metrics"
    " kv_cache_metrics_sample --enable-per-request-metrics --per-request-spec-decode-metrics"
    " --enable-server-load-tracking --enable-logging-iteration-details --show-hidden-metrics-for-version"
    " --custom-histogram-buckets --aggregate-engine-logging --enable-mfu-metrics --cudagraph-metrics",
    "the files show it": "load_format tokenizer_mode --jinja --enable-auto-tool-choice --enable-reasoning"
    " --reasoning-parser --reasoning-format -mm --mmproj --no-jinja config_format hf_config_path"
    " --chat-template-content-format --use-default-chat-template --skip-chat-parsing --no-skip-chat-parsing"
    " --reasoning-preserve --no-reasoning-preserve --cohere-format --cohere-is-reasoning-model --pooling"
    " --embd-normalize pooler_config io_processor_plugin --mmproj-auto --no-mmproj --no-mmproj-auto -mmu"
    " --mmproj-url",
    "prompts may be token ids in any case": "skip_tokenizer_init",
    "any model generates and embeds": "task runner convert --embedding --embeddings",
    "one library enforces guides": "guided_decoding_backend structured_outputs_config guided_whitespace_pattern",
    "tensor_parallel_size starts the processes": "distributed_executor_backend",
    "the sums of ranks need no setting": "disable_custom_all_reduce",
    "a conversation may have as many images as fit": "limit_mm_per_prompt",
    "a request may ask for any number": "max_logprobs",
    "the model stays loaded": "keep_alive ttl",
    "reasoning has its own field": "include_reasoning separate_reasoning",
    "penalties count all tokens": "repeat_last_n penalty_last_n",
    "text is what the tokenizer decodes": "spaces_between_special_tokens detokenize",
    "outputs have one form": "output_kind flat_logprobs extra_args pad_token_id logprobs_mode --tokens-only"
    " --return-tokens-as-token-ids return_sampling_mask",
    "it is so in any case": "-fa --flash-attn --mlock --no-mmap --mmap -cb --cont-batching attention_backend"
    " --no-webui --color --slots --no-slots --no-warmup --warmup -nocb --no-cont-batching --ui --webui --no-ui"
    " --single-turn -st -mli --multiline-input --simple-io --no-perf --props --skip-mm-profiling --log-prefix"
    " --no-log-prefix --log-timestamps --no-log-timestamps --no-log-jsonl --no-show-timings --display-prompt"
    " --no-display-prompt -kvu --kv-unified -no-kvu --no-kv-unified --kv-unified-per-slot --no-cache-idle-slots"
    " --cache-idle-slots --usage --enable-tokenizer-info-endpoint --fail-on-environ-validation",
    "usage and timings are in each answer": "--enable-prompt-tokens-details --enable-force-include-usage"
    " --enable-request-id-headers --response-role",
    "files are mapped, and read as they lie": "safetensors_load_strategy safetensors_prefetch_block_size"
    " safetensors_prefetch_num_threads model_loader_extra_config max_parallel_loading_workers pt_load_map_location"
    " use_tqdm_on_load ignore_patterns -lm --load-mode -lzm --lazy-mode --repack -nr --no-repack --no-host"
    " --direct-io",
}
"""Reason why nothing has to be given here -> names of it."""
_NOT_HERE = {
    "only --tensor-parallel-size cuts a model across devices": "pipeline_parallel_size -pp pp_size -ts tensor_split"
    " -sm split_mode --pipeline prefill_context_parallel_size decode_context_parallel_size"
    " cp_kv_cache_interleave_size dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate --rpc",
    "the checkpoint's generation_config.json has the defaults of requests, which set others": "generation_config"
    " override_generation_config",
    "CUDA_VISIBLE_DEVICES chooses the GPU": "-mg main_gpu",
    "--tensor-parallel-size cuts experts across devices too": "-ep enable_expert_parallel ep_size enable_eplb"
    " eplb_config expert_placement_strategy enable_ep_weight_filter all2all_backend enable_dbo"
    " dbo_decode_token_threshold dbo_prefill_token_threshold enable_return_routed_experts",
    "weights lie on the device; --quantization=int4 makes them smaller": "cpu_offload_gb -ot override_tensor -cmoe"
    " cpu_moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn offload_params cpu_offload_params offload_group_size"
    " offload_num_in_group offload_prefetch_step --op-offload --no-op-offload --spec-draft-override-tensor -otd"
    " --override-tensor-draft --spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-n-cpu-moe"
    " --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft offload_backend",
    "requests that lose their memory are computed again; --cache-offload keeps prefixes in files": "swap_space"
    " preemption_mode",
    "adapters are not supported; merge them into the checkpoint": "enable_lora lora lora_modules lora_paths"
    " lora_adapters max_loras max_lora_rank fully_sharded_loras default_mm_loras lora_dtype lora_target_modules"
    " max_cpu_loras max_lora_cls_labels enable_mixed_moe_lora_format enable_moe_shared_loras"
    " enable_tower_connector_lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled"
    " --control-vector-layer-range --adapter-path",
    "the checkpoint's config.json says how positions are rotated; change it there": "rope_scaling rope_freq_base"
    " rope_freq_scale hf_overrides override_kv --rope-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor"
    " --yarn-beta-slow --yarn-beta-fast",
    "max_pixels and min_pixels stand in the part of a message that has the image": "mm_processor_kwargs",
    "--min-p is the nearest": "typical_p typ_p mirostat mirostat_tau mirostat_eta tfs_z dynatemp_range top_a"
    " samplers dry_multiplier xtc_probability --typical -l --top-nsigma --top-n-sigma --xtc-threshold --dry-base"
    " --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay"
    " --dynatemp-exp --mirostat-lr --mirostat-ent --min-tokens-to-keep --sampler-seq --sampling-seq",
    "there is no beam search": "use_beam_search length_penalty early_stopping num_beams beam_width",
    "nothing of a prompt is cut; shorten it": "truncate_prompt_tokens n_keep num_keep --keep --context-shift"
    " --no-context-shift",
    "several engines are made by --replicas, on Ray": "data_parallel_address data_parallel_backend"
    " data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank"
    " data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank data_parallel_supervisor_port"
    " dp_sync_interval dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s"
    " dp_supervisor_probe_timeout_s disable_nccl_for_dp_synchronization api_server_count --headless nnodes"
    " node_rank master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds"
    " ray_workers_use_nsight enable_fault_tolerance fault_tolerance_config enable_elastic_ep"
    " elastic_ep_max_dp_size enable_scale_out enable_nccl_comm_suspend --watchdog-config",
    "a process serves one model; start several": "--models-dir --models-preset --models-max --models-autoload"
    " --no-models-autoload --tags --server-base --gpt-oss-20b-default --gpt-oss-120b-default"
    " --vision-gemma-4b-default --vision-gemma-12b-default --embd-gemma-default --fim-qwen-1 --fim-qwen-3b-default"
    " --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default",
    "the model stays loaded, with its weights": "enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph"
    " sleep_preserve_parameter_names --sleep-idle-seconds weight_transfer_config",
    "the plan chooses kernels; ostinato kernels shows them": "mamba_backend mamba_ssu_algorithm gdn_prefill_backend"
    " kda_prefill_backend kda_decode_backend linear_backend moe_backend attention_config kernel_config"
    " ir_op_priority monokernel optimization_level disable_cascade_attn sparse_indexer_topk_backend"
    " use_fp64_gumbel use_replayssm replayssm_buffer_len enable_batch_sharded_sampling -bs --backend-sampling"
    " quantize_activations -qa enable_hc_sp specialize_active_lora jit_monitor_mode jit_monitor_verbose"
    " kv_sharing_fast_prefill swa_bounded_replay enable_flash_late_interaction --enable-cumem-allocator"
    " --enable-flashinfer-autotune",
    "--quantization and the checkpoint say how weights are quantised": "quantization_config"
    " allow_deprecated_quantization kv_cache_dtype_skip_layers enable_mamba_cache_stochastic_rounding"
    " mamba_cache_philox_rounds",
    "the prefix cache needs no such choice": "prefix_caching_hash_algo prefix_cache_retention_interval"
    " disable_hybrid_kv_cache_manager enable_mamba_shared_prefix_checkpoint watermark"
    " --cache-reuse -sps --slot-prompt-similarity -dt --defrag-thold fingerprint_mode fingerprint_value"
    " prefix_match_unit --swa-full",
    "the scheduler needs no such choice": "scheduler_cls scheduler_reserve_full_isl long_prefill_token_threshold"
    " long_prefill_token_threshold_adaptive prefill_schedule_interval disable_chunked_mm_input"
    " disable_sliding_window --max-num-queued-tokens stream_interval",
    "there are no plugins; no code is loaded that is not in the package": "--middleware worker_cls"
    " worker_extension_cls additional_config logits_processor_pattern --tool-parser-plugin"
    " --reasoning-parser-plugin model_class_overrides model_impl engram_config diffusion_config aux_output_config"
    " watermark_config",
    "the client runs tools; the server only names them": "--tool-server --tools-runtime"
    " --mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent --ui-mcp-proxy --webui-mcp-proxy"
    " --no-ui-mcp-proxy --no-webui-mcp-proxy",
    "a request says it, in chat_template_kwargs, reasoning_effort and tool_choice": "--reasoning-effort"
    " --reasoning-budget --reasoning-budget-message reasoning_config --reasoning-effort-map"
    " --anthropic-disabled-thinking-effort --exclude-tools-when-tool-choice-none --tool-strict-level"
    " --trust-request-chat-template --prefill-assistant --no-prefill-assistant --prefill-response",
    "--log-level and --log-format are all that there is for logs": "--log-config-file --logging-config"
    " --log-error-stack --max-log-len --log-file --log-prompts-dir",
    "chat runs a model itself; a server that runs has a page at its address": "--url",
    "the page at / has no settings of its own": "--path --ui-config --webui-config --ui-config-file"
    " --webui-config-file --media-path",
    "HTTP/1.1 and TLS as they are, with limits of their own": "--grpc --grpc-port --h11-max-header-count"
    " --h11-max-incomplete-event-size --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh"
    " --sse-keep-alive-interval --sse-ping-interval --threads-http --reuse-port --disable-fastapi-docs"
    " --enable-offline-docs",
    "taskset and numactl choose cores; --threads their number": "-C --cpu-mask -Cr --cpu-range -Cb --cpu-mask-batch"
    " -Crb --cpu-range-batch --prio --prio-batch --poll --numa numa_bind numa_bind_cpus numa_bind_nodes"
    " renderer_num_workers --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd"
    " --cpu-range-draft --spec-draft-prio --prio-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft"
    " --spec-draft-prio-batch --prio-batch-draft --spec-draft-threads -td --threads-draft"
    " --spec-draft-threads-batch -tbd --threads-batch-draft",
    "images and videos have --max-images, --max-body and max_pixels alone": "media_io_kwargs mm_device_do_normalize"
    " mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin"
    " mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb"
    " mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_shm_cache_max_object_size_mb"
    " mm_tensor_ipc enable_mm_embeds enable_prompt_embeds interleave_mm_strings language_model_only"
    " video_pruning_method trust_request_mm_kwargs enable_shm_tensor_arena --mmproj-offload --no-mmproj-offload"
    " -mmdev --mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps"
    " --video-timestamp-interval --video-ffmpeg-dir --video --audio allowed_local_media_path ec_transfer_config"
    " ec_manager_config",
    "there is no reranking and no infilling": "--rerank --reranking --spm-infill",
    "ostinato generate prints to stdout": "--output-file -o",
    "--speculative has a method, a model and a number alone": "--spec-draft-type-k -ctkd --cache-type-k-draft"
    " --spec-draft-type-v -ctvd --cache-type-v-draft -lcs --lookup-cache-static -lcd --lookup-cache-dynamic"
    " --spec-draft-n-min --draft-min --draft-n-min --spec-synth-len --spec-synth-rates --spec-draft-p-split"
    " --draft-p-split --spec-draft-p-min --draft-p-min --spec-draft-backend-sampling"
    " --no-spec-draft-backend-sampling --spec-draft-device -devd --device-draft --spec-draft-ngl -ngld"
    " --gpu-layers-draft --n-gpu-layers-draft --spec-ngram-mod-n-min --spec-ngram-mod-n-max"
    " --spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits"
    " --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n"
    " --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --spec-ngram-size-n --spec-ngram-size-m"
    " --spec-ngram-min-hits",
    "--record and ostinato replay record and repeat what an engine did": "enable_trace_replay",
    "keys and values lie on the device": "-kvo --kv-offload -nkvo --no-kv-offload",
    "a prompt is taken as it is typed": "-e --escape --no-escape",
}
"""Reason why there is no counterpart here -> names of it."""

_GUIDES = (
    "structured_outputs guided_decoding response_format guided_json guided_regex guided_choice guided_grammar"
    " json_schema json_object regex choice grammar lark"
)


def _each(table: Mapping[str, str]) -> dict[str, str]:
    return {name: here for here, names in table.items() for name in names.split()}


def _by_flag(table: Mapping[str, str]) -> dict[str, str]:
    """Return the flags of a table with what is said of them, where settings are flags."""
    said = {name: re.sub("(--[a-z-]+)=", r"\1 ", here) for name, here in _each(table).items()}
    return {name if name[0] == "-" else "--" + name.replace("_", "-"): here for name, here in said.items()}


def _by_keyword(table: Mapping[str, str], before: str) -> dict[str, str]:
    """Return the names in Python with what is said of them, where settings are keywords."""

    def keyword(flag: re.Match[str]) -> str:
        return flag[1].replace("-", "_") + (f"={flag[2]!r}" if flag[2] else "")

    said = {name: here for name, here in _each(table).items() if name[0] != "-"}
    return {name: before + re.sub("--([a-z-]+)(?:=([^ ,]+))?", keyword, here) for name, here in said.items()}


def _fields(here: str) -> list[str]:
    """Return the names that a row begins with, each with the remark that follows them all."""
    names, comma, remark = here.partition(",")
    return [name + comma + remark for name in names.split()]


FLAG_EQUIVALENTS: dict[str, str | None] = {
    **_by_flag(_SETTINGS),
    **_by_flag({f"--{_fields(here)[0].replace('_', '-')}": names for here, names in _PARAMETERS.items()}),
    **dict.fromkeys(_by_flag(_NOT_NEEDED)),
}
"""Flags of vLLM, SGLang, TGI, llama.cpp and Ollama -> flags here; None if nothing has to be given here."""
REFUSED = _by_flag(_NOT_HERE)
"""Flags of other engines -> why there are none here."""
LEFT_OUT = {**_by_keyword(_NOT_NEEDED, "leave it out; "), **_by_keyword(_NOT_HERE, "leave it out; ")}
"""Other engines' names of what is not given here -> why."""
SETTING_ADVICE = {
    **_by_keyword(_SETTINGS, "here it is "),
    **LEFT_OUT,
    "data_parallel_size": "make several LLMs, or `ostinato serve --replicas N`",
    "served_model_name": "it is a flag of `ostinato serve`",
}
"""Other engines' names for settings -> advice what to use here."""
SAMPLING_ADVICE = {
    **{
        name: f"here it is {_fields(here)[0]}"
        for here, names in _PARAMETERS.items()
        for name in [*here.partition(",")[0].split()[1:], *names.split()]
    },
    **LEFT_OUT,
    **dict.fromkeys(_GUIDES.split(), "here it is guide={'json_schema': SCHEMA}, or regex, choice, json_object or lark"),
    "logits_processors": "there are logit_bias, penalties and guide; no code of a request runs in a step",
    "echo": "leave it out; the output has prompt and prompt_logprobs",
}
"""Other engines' names for sampling parameters -> advice what to use here."""
FIELD_EQUIVALENTS: dict[str, str | tuple[str, ...]] = {
    **{name: f"a setting of the server, {ours.replace('=', ' ')}" for name, ours in _each(_SETTINGS).items()},
    **_by_keyword(_NOT_NEEDED, "not needed, as "),
    **_by_keyword(_NOT_HERE, "not served; "),
    **{
        name: tuple(_fields(here))
        for here, names in {**_PARAMETERS, **_FIELDS}.items()
        for name in (names + " " + here.partition(",")[0]).split()
    },
    **_each(_DONE_BY),
}
"""Field in other engines, or at other endpoints -> the fields here, or what it is here."""

_FLOATS = {"bfloat16": "bf16", "float16": "fp16 f16 half", "float32": "fp32 f32 float"}
_ALL_FLOATS = " ".join([*_FLOATS, *_FLOATS.values()])
_BLOCKS = "a GGUF file keeps the format that it has; others are made here while loading"
_VALUES = {
    "dtype": {**_FLOATS, "auto: weights of fewer bits are a matter of quantization": "int8 fp8 int4"},
    "ssm_state_dtype": {
        **_FLOATS,
        "float32: 8 bits are for cached checkpoints (ssm_checkpoint_dtype int8); running states of 8 bits take longer "
        "to update than those of 16": "int8 fp8 8bit q8_0 fp8_e4m3 fp8_e5m2",
    },
    "quantization": {
        f"int8_g128: {_BLOCKS}": "q8_0 q6_k q5_k_m q5_k_s q5_0 q5_1",
        f"int4_g32: {_BLOCKS}": "q4_0 q4_1 q4_k_m q4_k_s q4_k q3_k_m q2_k mxfp4",
        "int8": "fp8 8bit w8a8 w8a16 q8",
        "int4": "4bit w4a16 bitsandbytes nf4 q4",
        "auto: a quantised checkpoint says so itself": "awq gptq compressed-tensors",
        "none: the dtype of weights that are not quantised is dtype": _ALL_FLOATS,
    },
    "graph_mode": {"full_decode_only": "full", "none": "eager"},
    "scheduling_policy": {"fcfs": "fifo"},
    "device": {
        "cuda: CUDA_VISIBLE_DEVICES chooses among several GPUs": "gpu nvidia cuda:0",
        "cuda: only `plan` takes names of GPUs": "h100 h200 a100 b200 l4 l40s",
    },
    "kv_cache_dtype": {
        "int8: 8-bit keys and values are int8, which keeps more of each number in as many bytes": "fp8 fp8_e4m3"
        " fp8_e5m2 fp8_inc",
        "int8": "q8 8bit int4",
        "int8: 8-bit keys and values are int8, with one scale for each token's head": "q8_0",
        "int8: keys and values have no fewer than 8 bits, as int8": "q4_0 q4_1 iq4_nl q5_0 q5_1",
        "auto: keys and values that are not int8 have the dtype of the model (dtype)": _ALL_FLOATS,
    },
}


def other_value(setting: str, word: str) -> tuple[str | None, str]:
    """Return the value to use here for one that `setting` has in vLLM or llama.cpp, and why; None if it is unknown."""
    here, _, why = _each(_VALUES.get(setting, {})).get(word, "").partition(": ")
    return here or None, why


_TEXT = "outputs[0].text, .token_ids and .finish_reason: a prompt may have several outputs"
_VECTORS = "embed, which returns a vector for each prompt"
_NO_SCORES = "not served, as there are no classifiers and no rerankers; embed returns vectors, which can be compared"
_ATTRIBUTES = {
    "ostinato": {
        "plan_model(MODEL, ...)": "plan make_plan",
        "verify_model(MODEL, ...)": "verify",
        "LLM(MODEL, ...)": "load Llama LLMEngine Engine pipeline AutoModelForCausalLM",
        "AsyncLLM(MODEL, ...)": "AsyncLLMEngine AsyncEngine",
        "EngineConfig(...), or the keywords of LLM": "EngineArgs AsyncEngineArgs ModelParams ServerArgs VllmConfig",
        "LLM(MODEL).generate(PROMPTS) and .chat(MESSAGES)": "generate chat complete completion stream_generate",
        "LLM(MODEL).embed(TEXTS)": "embed embeddings",
        "SamplingParams(...)": "GenerationConfig SamplingParameters",
        "Guide(...)": "StructuredOutputsParams GuidedDecodingParams LlamaGrammar",
        "the keywords of LLM.embed": "PoolingParams",
        "text, a list of token ids, or a dict as in vLLM": "TextPrompt TokensPrompt PromptType",
    },
    "LLM": {
        "get_tokenizer().encode(TEXT) for token ids, and embed for vectors": "encode tokenize",
        "get_tokenizer().decode(TOKEN_IDS)": "decode detokenize",
        "get_tokenizer()": "tokenizer",
        _VECTORS: "embeddings create_embedding",
        _NO_SCORES: "score classify reward rerank",
        "generate(PROMPTS)": "create_completion completion complete __call__ enqueue",
        "chat(MESSAGES), or stream_chat": "create_chat_completion preprocess_chat chat_completion",
        "stream, or stream_chat": "stream_generate generate_stream",
        "there is no beam search; SamplingParams(n=8, logprobs=0) gives outputs to choose from": "beam_search",
        "plan.settings, and plan": "model_config llm_config server_args get_server_info",
        "engine": "llm_engine",
        "stats()": "get_metrics metrics",
        "close()": "sleep shutdown unload",
        "LLM(MODEL, ...) again: a closed one stays closed": "wake_up",
        "reset_prefix_cache()": "flush_cache reset_mm_cache reset",
        "the command ostinato bench profile MODEL": "start_profile stop_profile",
        "not served: no code runs in the engine": "collective_rpc apply_model",
        "the setting tokenizer, as LLM(MODEL, tokenizer=PATH)": "set_tokenizer",
        "reset_prefix_cache() and get_tokenizer(); states are saved by the setting cache_dir": "save_state load_state",
    },
    "AsyncLLM": {
        "AsyncLLM(MODEL, ...), with the settings as keywords": "from_engine_args from_vllm_config",
        "await generate(PROMPTS), or async for piece in stream(PROMPT)": "add_request __call__",
        "leave a stream, or cancel the task that waits": "abort",
        "await close()": "shutdown shutdown_background_loop sleep",
        "await stats()": "do_log_stats get_metrics",
        "plan.settings, and plan": "get_model_config model_config",
        "get_tokenizer().encode(TEXT) for token ids, and embed for vectors": "encode tokenize",
        "get_tokenizer()": "tokenizer",
        _NO_SCORES: "score classify reward rerank",
        "stats(), which fails once the engine has failed": "check_health errored is_running",
    },
    "RequestOutput": {
        _TEXT: "text token_ids finish_reason stop_reason logprobs cumulative_logprob generated_text output_ids",
        "times, in seconds: arrival, scheduled, first_token and last_token": "metrics timings",
        "prompt_token_ids": "prompt_ids input_ids",
        "len(prompt_token_ids), len(outputs[0].token_ids) and num_cached_tokens": "usage meta_info",
        "embedding, of the vectors that LLM.embed returns": "data",
    },
    "CompletionOutput": {
        "text": "generated_text content message",
        "token_ids": "tokens output_ids output_token_ids",
        "len(token_ids)": "num_tokens usage",
        "the times of the RequestOutput around it": "metrics times",
    },
}
"""Class -> what to use here -> names of it in vLLM, SGLang, llama-cpp-python and transformers."""


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object, or the module of a name, does not have, with the nearest."""
    kind = owner if isinstance(owner, str) else type(owner).__name__
    here = _each(_ATTRIBUTES.get(kind, {})).get(name)
    said = f"module {kind!r} has no attribute {name!r}" if kind == "ostinato" else f"{kind} has no {name}"
    if here is None and not name.startswith("_") and not isinstance(owner, str):
        near = get_close_matches(name, [each for each in dir(owner) if not each.startswith("_")], 1)
        here = f"did you mean {near[0]}?" if near else None
    elif here is not None:
        here = here if here.startswith(("not served", "there is no")) else f"here it is {here}"
    return AttributeError(f"{said}: {here}" if here else said)


REPLACED = {"--plot": "python tools/plot_bench.py REPORT.json FILE.png draws the report that --json prints"}
"""Flags that were once here -> what does the same."""

COMMANDS_HERE = _each(
    {
        "ostinato chat MODEL": "run",
        "ostinato chat MODEL, or ostinato generate MODEL PROMPT": "cli",
        "ostinato generate": "complete completion",
        "ostinato serve MODEL": "start server launch_server api_server",
        "ostinato inspect MODEL": "show info",
        "ostinato eval MODEL": "perplexity",
        "ostinato bench": "benchmark",
        "ostinato batch IN.jsonl OUT.jsonl": "run-batch",
        "ostinato fetch MODEL": "pull download",
        "ostinato COMMAND --help": "help",
        "ostinato --version": "version",
        "ostinato serve's page, or its /metrics: a server has one model, which stays loaded": "ps",
        "ostinato plan, whose section on the device says what was found": "collect-env",
        "Ctrl-C or SIGTERM, which end a server once its requests have ended": "stop",
        "POST /v1/embeddings of ostinato serve MODEL, or LLM.embed in Python": "embed embedding",
        "--quantization int8, which quantises while loading; GGUF files are made by llama.cpp": "quantize convert",
        "--model FILE.gguf with --chat-template and --system: there are no Modelfiles": "create",
        "--served-model-name NAME, which gives a model another name": "cp",
        "hf cache ls, for what came from the hub": "list ls",
        "hf cache rm, for what came from the hub": "rm",
        "hf upload: the hub's own client puts models there": "push",
        "hf auth login": "login signin",
    }
)
"""Commands of other engines -> ours."""


_SHORT_COMMANDS = {"list": "ls", "remove": "rm", "delete": "rm"}
"""Other words for the commands of a group."""


def advice_on_command(name: str, ours: Sequence[str]) -> str:
    """Return what to type in place of an unknown command."""
    if name in _SHORT_COMMANDS and _SHORT_COMMANDS[name] in ours:
        return f"did you mean {_SHORT_COMMANDS[name]}?"
    if name in COMMANDS_HERE:
        return f"here it is {COMMANDS_HERE[name]}"
    near = get_close_matches(name, ours, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(ours)}"


def advice(flag: str) -> str | None:
    """Return what to type in place of another engine's flag, or None if that is unknown too."""
    name = flag.partition("=")[0]
    if name in REPLACED:
        return REPLACED[name]
    if name in REFUSED:
        return f"it has no counterpart here: {REFUSED[name]}"
    if name not in FLAG_EQUIVALENTS:
        return None
    ours = FLAG_EQUIVALENTS[name]
    return "leave it out: here that needs no flag" if ours is None else f"here it is {ours}"
