// The table of the settings of a training: a row for each field of RunSpec that a user can choose.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "train/run_spec.hpp"
#include "train/setting.hpp"

namespace gyre::train {

// All rows, in the order of --help. They write into `run`, which must outlive them.
std::vector<Setting> settings(RunSpec& run);

// Rows that other subcommands have, too.
std::vector<Setting> data_settings(RunSpec& run);
std::vector<Setting> rank_settings(RunSpec& run);
std::vector<Setting> device_settings(RunSpec& run);
std::vector<Setting> diagnosis_settings(RunSpec& run);
Setting model_setting(RunSpec& run, std::string help = {});  // empty: what nets there are
Setting precision_setting(RunSpec& run);
Setting views_setting(RunSpec& run);
Setting threads_setting(RunSpec& run);
Setting device_setting(RunSpec& run, std::string help);
Setting optimizer_setting(RunSpec& run, std::string help);
Setting bucket_setting(RunSpec& run);

// The value that a run has for a setting.
struct SettingValue {
    std::string name;
    std::string value;  // as Setting::value() writes it
    bool given;         // another value than the default
    Scope scope;
    bool must_match_on_resume;
};
// The values of all rows, in their order.
std::vector<SettingValue> values_of(RunSpec run);
// The one of this name; null if there is none.
const SettingValue* find(const std::vector<SettingValue>& values, std::string_view name);

// The values that a resumed training must have again.
Values values_to_resume(RunSpec run);

}  // namespace gyre::train
