#include "bench/kernels.hpp"

namespace gyre::bench {

const std::vector<Net>& nets() {
    static const std::vector<Net> all = {{"net",
                                          {{"batch", GatherWork{{1, 28, 28}}},
                                           {"conv1", ConvWork{{{1, 28, 28}, 10, 5, 1, 0}, false}},
                                           {"pool1", PoolWork{{{10, 24, 24}, 2, 2}}},
                                           {"relu1", ReluWork{{10, 12, 12}}},
                                           {"conv2", ConvWork{{{10, 12, 12}, 20, 5, 1, 0}}},
                                           {"drop1", DropoutWork{{20, 8, 8}, true}},
                                           {"pool2", PoolWork{{{20, 8, 8}, 2, 2}}},
                                           {"relu2", ReluWork{{20, 4, 4}}},
                                           {"fc1", LinearWork{{320, 50}}},
                                           {"relu3", ReluWork{{50, 1, 1}}},
                                           {"drop2", DropoutWork{{50, 1, 1}}},
                                           {"fc2", LinearWork{{50, 10}}},
                                           {"loss", LossWork{10}},
                                           {"parameters", ParameterWork{21'840}}}},
                                         {"wide",
                                          {{"conv1", ConvWork{{{1, 28, 28}, 64, 3, 1, 1}, false}},
                                           {"relu1", ReluWork{{64, 28, 28}}},
                                           {"conv2", ConvWork{{{64, 28, 28}, 128, 3, 1, 1}}},
                                           {"relu2", ReluWork{{128, 28, 28}}},
                                           {"pool1", PoolWork{{{128, 28, 28}, 2, 2}}},
                                           {"fc1", LinearWork{{25'088, 1024}}},
                                           {"relu3", ReluWork{{1024, 1, 1}}},
                                           {"drop1", DropoutWork{{1024, 1, 1}}},
                                           {"fc2", LinearWork{{1024, 10}}},
                                           {"parameters", ParameterWork{25'775'882}}}},
                                         {"resnet",
                                          {{"bn1", BatchNormWork{{32, 28, 28}}},
                                           {"bn2", BatchNormWork{{64, 28, 28}}},
                                           {"bn3", BatchNormWork{{64, 14, 14}}},
                                           {"add1", AddWork{{64, 14, 14}}},
                                           {"bn5", BatchNormWork{{128, 14, 14}}},
                                           {"bn6", BatchNormWork{{128, 7, 7}}},
                                           {"add2", AddWork{{128, 7, 7}}},
                                           {"avgpool1", AvgPoolWork{{{128, 7, 7}, 7, 7, 1}}}}}};
    return all;
}

}  // namespace gyre::bench
